"""The phases of a restart, which rank 0 prints after its first step."""

import json
import re
import time

from support.training import make


def test_a_restarted_rank_prints_its_phases_once(monkeypatch, capsys):
    found_at = time.time() - 7
    times = {"found": found_at, "ended": found_at + 0.2, "started": found_at + 0.5}
    monkeypatch.setenv("HOCKET_FAILURE", json.dumps(times))
    with make(max_duration="3ba") as trainer:
        trainer.fit()
    found = re.findall(r"note: seconds since the launcher found a failed rank: (.*)", capsys.readouterr().err)
    assert len(found) == 1
    phases = dict(phase.rsplit(" ", 1) for phase in found[0].split(", "))
    assert list(phases) == ["ended", "started", "joined", "loaded", "first step"]
    assert (phases["ended"], phases["started"]) == ("0.2", "0.5")
    seconds = [float(phases[name]) for name in ("joined", "loaded", "first step")]
    assert seconds == sorted(seconds)
    assert seconds[0] >= 7
    with make(max_duration="1ba") as trainer:
        trainer.fit()
    assert "failed rank" not in capsys.readouterr().err
