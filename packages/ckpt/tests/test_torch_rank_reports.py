"""The messages in which ranks report their part of a save, and their limit."""

import json
import os

import pytest
from torch.distributed import HashStore

from hocket.ckpt.errors import CheckpointNotFoundError, CheckpointStateError
from hocket.ckpt.torch.ranks.coordinator import Coordinator
from hocket.ckpt.torch.ranks.error_propagation import pack_error
from hocket.ckpt.torch.saving.rank_reports import RankReport, ReportHead, leads_of, read_reports
from hocket.native import _native

FILE = {
    "path": "data/01234567-r00000-000.safetensors",
    "size": 4104,
    "data_start": 4096,
    "header": "A" * 22 + "==",
    "digests": "A" * 22 + "==",
    "entries": {"a\nb@0": (0, 8)},
}


def head(peers=None, failure=None):
    return ReportHead(destination="`x` of step 1", layout="l", values="v", peers=peers, failure=failure)


def test_a_report_comes_back_as_it_was_through_torchs_store():
    packed = _native.ckpt_pack_report(FILE, [("a\nb@0", 3, (0,), (2,))], json.dumps({"line\n": [1.5, None]}))
    failure = pack_error(CheckpointNotFoundError("no\nfile"), ranks=[1])
    reports = [
        RankReport(head=head((0, 1), failure), tree=b'{"ranks": []}', packed=packed),
        RankReport(head=head((0, 1)), packed=b"\n\n"),
        RankReport(head=head((0, 1)), packed=os.urandom(1000)),
    ]
    coordinator = Coordinator(HashStore(), rank=0, world_size=3, nonce=b"")
    for rank, report in enumerate(reports):
        coordinator.post(f"report/{rank}", report.to_bytes())
    texts = coordinator.collect("report", range(3), timeout_s=30, what="its part")
    found = read_reports(texts[rank] for rank in range(3))
    assert found == reports
    assert found[1].head is found[2].head
    assert _native.CkptReports([packed, packed]).files() == [
        (rank, FILE["path"], FILE["size"]) for rank in range(2)
    ]


def test_the_leads_are_the_first_ranks_of_the_stages():
    stages = [RankReport(head=head(peers)) for peers in ((0, 2), (1,), (0, 2))]
    assert leads_of(stages) == [0, 1, 0]
    with pytest.raises(CheckpointStateError, match=r"`peers` is \[0, 2\] on the ranks \[0\]"):
        leads_of(stages[:2])


def test_a_report_larger_than_the_store_takes_is_refused():
    fits = RankReport(head=head(), packed=bytes((8 << 20) - 1000))
    assert len(fits.to_bytes()) <= 8 << 20
    with pytest.raises(CheckpointStateError, match="at most 8388608 pass through"):
        RankReport(head=head(), packed=bytes(8 << 20)).to_bytes()


def test_what_is_no_report_is_refused_with_its_rank():
    packed = _native.ckpt_pack_report(None, [])
    with pytest.raises(ValueError, match="the report of rank 1"):
        _native.CkptReports([packed, b"rubbish"])
    with pytest.raises(KeyError):
        _native.ckpt_pack_report(FILE, [("other", 0, (0,), (2,))])
    with pytest.raises(ValueError, match="no JSON"):
        _native.ckpt_pack_report(None, [], "{")
