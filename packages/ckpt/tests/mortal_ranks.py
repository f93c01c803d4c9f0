"""Two ranks that save or publish, one of which may be killed or stopped meanwhile.

The ranks are forked from this process, which imports torch once. It reads requests from standard input, one
JSON object a line: `folder` (or URI), `env` of its store, `step`, `mode` (or `num_versions` to publish from
this step on), `num_items` of the tensor, `victim` (a rank, or null) and `delay_s`, the seconds from the start
of the victim's save to the kill; or `stopped`, a rank that stops itself during its save and is continued when
the other rank has finished. It writes one answer a line: for each rank its error, null without one, or
`killed`; and the seconds that the save took.
"""

import json
import os
import signal
import socket
import sys
import time

import torch
from torch.distributed import TCPStore

from hocket.ckpt.torch import CheckpointStore, Publisher
from hocket.ckpt.torch import store as stores
from hocket.ckpt.torch.ranks.coordinator import Coordinator
from hocket.ckpt.torch.ranks.kv_store import DeadlineStore

WORLD_SIZE = 2
DEADLINE_S = 60


def state(step, num_items):
    """Return the state of both ranks at a step; each rank writes half of `w`."""
    return {
        "w": torch.arange(num_items, dtype=torch.float32) + step,
        "small": torch.full((3,), step),
        "step": step,
    }


def save(request, rank, nonce, ports, peer, begun):
    if rank == 0:
        shared = TCPStore("127.0.0.1", 0, WORLD_SIZE, is_master=True, wait_for_workers=False)
        os.write(ports[1], f"{shared.port}\n".encode())
    else:
        port = int(os.read(ports[0], 16))
        shared = DeadlineStore(
            lambda: TCPStore("127.0.0.1", port, WORLD_SIZE, is_master=False, wait_for_workers=False),
            timeout_s=1.5 if request["stopped"] == 0 else 30,
        )
    coordinator = Coordinator(shared, rank=rank, world_size=WORLD_SIZE, nonce=nonce)
    is_whole = request["victim"] is None and request["stopped"] is None
    timeout_s = 30 if is_whole else 1.5  # shorter if one rank will be missing
    if "num_versions" in request:
        return publish(request, rank, coordinator, peer, begun, timeout_s=timeout_s)
    store = CheckpointStore(request["folder"], timeout_s=timeout_s, coordinator=coordinator)
    held = state(request["step"], request["num_items"])
    # The ranks meet by a socket and not by the coordinator, whose rank may stop before it answers.
    peer.sendall(b".")
    assert peer.recv(1) == b".", "the other rank has ended"
    os.write(begun, b"%d" % rank)
    began = time.monotonic()
    try:
        store.save(held, step=request["step"], mode=request["mode"]).wait(40)
    finally:
        if is_whole:  # `close` waits for both ranks, of which one may be dead
            store.close()
        if request["stopped"] is not None:
            os.write(begun, b"+")
            coordinator.tick("through")
            if rank == 0:  # rank 0 serves the coordinator, which rank 1 still needs
                coordinator.await_ticks("through", WORLD_SIZE, timeout_s=30)
    return time.monotonic() - began


def publish(request, rank, coordinator, peer, begun, *, timeout_s):
    """Publish versions, each rank its half of them; return the seconds that it took."""
    stores.open_coordinator = lambda **_: coordinator
    publisher = Publisher(request["folder"], full_every=3, keep_full=2, timeout_s=timeout_s)
    peer.sendall(b".")
    assert peer.recv(1) == b".", "the other rank has ended"
    os.write(begun, b"%d" % rank)
    began = time.monotonic()
    for step in range(request["step"], request["step"] + request["num_versions"]):
        publisher.publish(state(step, request["num_items"]), step=step, mode=request["mode"])
    publisher.wait(40)
    if request["victim"] is None:
        publisher.close()
    return time.monotonic() - began


def run_rank(request, rank, nonce, ports, peer, begun, said):
    signal.alarm(DEADLINE_S)
    os.environ.update(request["env"])
    heard, took_s = None, 0.0
    try:
        took_s = save(request, rank, nonce, ports, peer, begun)
    except Exception as error:  # noqa: BLE001 - compared by the test
        heard = f"{type(error).__name__}: {error}"
    os.write(begun, b"+")  # also after an error: the other rank may wait stopped
    os.write(said, json.dumps([rank, heard, took_s]).encode() + b"\n")
    os._exit(0)


def answer(request):
    ports, begun, said, peers = os.pipe(), os.pipe(), os.pipe(), socket.socketpair()
    nonce, pids = os.urandom(16), []
    for rank in range(WORLD_SIZE):
        pids.append(os.fork())
        if pids[-1] == 0:
            peers[1 - rank].close()
            run_rank(request, rank, nonce, ports, peers[rank], begun[1], said[1])
    for pipe in (ports, begun, said):
        os.close(pipe[1])
    os.close(ports[0])
    for peer in peers:
        peer.close()
    victim = request["victim"]
    if victim is not None:
        while os.read(begun[0], 1) not in (b"%d" % victim, b""):
            pass
        time.sleep(request["delay_s"])
        os.kill(pids[victim], signal.SIGKILL)
    if request["stopped"] is not None:
        late = pids[request["stopped"]]
        assert os.WIFSTOPPED(os.waitpid(late, os.WUNTRACED)[1]), "the rank ended and did not stop"
        while os.read(begun[0], 1) not in (b"+", b""):
            pass
        os.kill(late, signal.SIGCONT)
    ended = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    with os.fdopen(said[0]) as lines:
        answers = [json.loads(line) for line in lines]
    os.close(begun[0])
    heard = {rank: said for rank, said, _ in answers}
    told = [
        heard.get(rank, "killed") if status in (0, -signal.SIGKILL) else f"ended with {status}"
        for rank, status in enumerate(ended)
    ]
    return told, max((took_s for _, _, took_s in answers), default=0.0)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), flush=True)
