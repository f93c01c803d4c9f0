"""Two processes that save under the same names at the same time.

The writers are forked from this process, which imports torch once. It reads requests from standard input, one
JSON object a line: `prefix`, `env` of its store, and the number of `trials`. It writes one answer a line: for
each trial the outcomes of both saves, null for success, else the error.
"""

import json
import os
import random
import signal
import socket
import sys
import time

import torch

from hocket.ckpt.torch import CheckpointStore

DEADLINE_S = 500
NUM_ITEMS = 1 << 18


def step_of(trial, writer):
    return 2 * trial + writer


def state(step):
    """Return what a writer saves at a step; no tensor equals one of the other writer's."""
    tensors = {f"w{number}": torch.arange(NUM_ITEMS >> number) * 1000 + step for number in range(4)}
    return {**tensors, "step": step}


def write(request, writer, peer):
    """Run this writer's saves, and return the outcome of each."""
    os.environ.update(request["env"])
    store, heard = CheckpointStore(request["prefix"], timeout_s=60), []
    for trial in range(request["trials"]):
        step, mode = step_of(trial, writer), ("sync", "async")[trial % 2]
        held = state(step)
        peer.sendall(b".")
        assert peer.recv(1) == b".", "the other writer has ended"
        time.sleep(random.uniform(0, random.choice((0.003, 0.03))))
        try:
            store.save(held, step=step, name=f"trial-{trial}", mode=mode).wait(60)
        except Exception as error:  # noqa: BLE001 - compared by the test
            heard.append(f"{type(error).__name__}: {error}")
        else:
            heard.append(None)
    store.close()
    return heard


def run_writer(request, writer, peer, said):
    signal.alarm(DEADLINE_S)
    random.seed(os.getpid())
    heard = write(request, writer, peer)
    with os.fdopen(said, "w") as pipe:
        json.dump(heard, pipe)


def answer(request):
    peers, pids, pipes = socket.socketpair(), [], []
    for writer in range(2):
        pipe = os.pipe()
        pipes.append(pipe[0])
        pids.append(os.fork())
        if pids[-1] == 0:
            status = 1
            try:
                peers[1 - writer].close()
                run_writer(request, writer, peers[writer], pipe[1])
                status = 0
            finally:
                os._exit(status)
        os.close(pipe[1])
    for peer in peers:
        peer.close()
    heard = []
    for pipe in pipes:
        with os.fdopen(pipe) as lines:
            heard.append(lines.read())
    ended = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    assert ended == [0, 0], ended
    return list(zip(*map(json.loads, heard), strict=True))


if __name__ == "__main__":
    torch.set_num_threads(1)
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), flush=True)
