"""The handshake of nodes and the seals of their messages: only the very next message of the other end is taken."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spot_async.config import ClusterConfig
from spot_async.errors import ConfigError
from spot_async.trainer.nodes.authentication import (
    CHALLENGE_BYTES,
    SECRET_VARIABLE,
    ForgedError,
    Purpose,
    Seals,
    Secret,
    admitted,
    answer_of,
    cluster_secret,
    proven,
)

SECRET = Secret(b"0123456789abcdef")
CHALLENGES = st.binary(min_size=CHALLENGE_BYTES, max_size=CHALLENGE_BYTES)
MESSAGES = st.lists(st.binary(max_size=20), min_size=1, max_size=6)


def met(gate: bytes = b"a" * 32, visit: bytes = b"b" * 32, purpose: Purpose = Purpose.NODE) -> tuple[Seals, Seals]:
    """Return both ends' seals after a handshake: node 0's and node k's."""
    said = (bytes([purpose]), gate, visit)
    admitted_for, proof, seals = admitted(SECRET, gate, answer_of(SECRET, said))
    assert admitted_for is purpose
    return seals, proven(SECRET, said, proof)


@given(gate=CHALLENGES, visit=CHALLENGES, purpose=st.sampled_from(Purpose), messages=MESSAGES)
def test_who_knows_the_secret_is_understood_in_both_directions(
    gate: bytes, visit: bytes, purpose: Purpose, messages: list[bytes]
) -> None:
    ends = met(gate, visit, purpose)
    for sender, receiver in (ends, ends[::-1]):
        for message in messages:
            receiver.receiving.check(message, sender.sending.tag(message))


@given(position=st.integers(0, 8 * 65 - 1))
def test_an_answer_with_any_bit_changed_is_refused(position: int) -> None:
    answer = bytearray(answer_of(SECRET, (bytes([Purpose.STORE]), b"a" * 32, b"b" * 32)))
    answer[position // 8] ^= 1 << position % 8
    with pytest.raises(ForgedError):
        admitted(SECRET, b"a" * 32, bytes(answer))


@given(size=st.integers(0, 64))
def test_an_answer_that_is_cut_is_refused(size: int) -> None:
    answer = answer_of(SECRET, (bytes([Purpose.NODE]), b"a" * 32, b"b" * 32))
    with pytest.raises(ForgedError):
        admitted(SECRET, b"a" * 32, answer[:size])


def test_another_secret_a_recorded_answer_and_a_recorded_or_returned_proof_are_refused() -> None:
    said, again = ((bytes([Purpose.NODE]), b"a" * 32, own) for own in (b"b" * 32, b"d" * 32))
    answer = answer_of(SECRET, said)
    _, proof, _ = admitted(SECRET, b"a" * 32, answer)
    for refused in (
        lambda: admitted(Secret(b"another secret!!"), b"a" * 32, answer),
        lambda: admitted(SECRET, b"c" * 32, answer),  # said to a later challenge
        lambda: proven(SECRET, said, answer[-32:]),  # its own proof sent back
        lambda: proven(SECRET, again, proof),
    ):
        with pytest.raises(ForgedError):
            refused()


@given(messages=MESSAGES, other=st.binary(max_size=20), purpose=st.sampled_from(Purpose))
def test_a_message_that_is_changed_left_out_repeated_returned_or_of_another_connection_is_refused(
    messages: list[bytes], other: bytes, purpose: Purpose
) -> None:
    def after_all() -> tuple[Seals, Seals]:
        """Return both ends after all messages went from node 0 to node k."""
        here, there = met(purpose=purpose)
        for message in messages:
            there.receiving.check(message, here.sending.tag(message))
        return here, there

    here, there = after_all()
    tag = here.sending.tag(other)
    with pytest.raises(ForgedError):
        there.receiving.check(other + b"!", tag)
    here, there = after_all()
    here.sending.tag(b"lost")
    with pytest.raises(ForgedError):
        there.receiving.check(other, here.sending.tag(other))
    here, there = after_all()
    tag = here.sending.tag(other)
    there.receiving.check(other, tag)
    with pytest.raises(ForgedError):
        there.receiving.check(other, tag)
    here, there = after_all()
    with pytest.raises(ForgedError):
        here.receiving.check(messages[0], met(purpose=purpose)[0].sending.tag(messages[0]))
    with pytest.raises(ForgedError):
        there.receiving.check(other, met(b"z" * 32, purpose=purpose)[0].sending.tag(other))


def test_the_secret_comes_from_the_environment_or_from_a_file_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("0123456789abcdef\n")
    file.chmod(0o600)
    alone, by_file = ClusterConfig(), ClusterConfig(secret_file=file)
    environment = {SECRET_VARIABLE: "fedcba9876543210"}
    assert cluster_secret(environment, alone).value == b"fedcba9876543210"
    assert cluster_secret(environment, by_file).value == b"0123456789abcdef"
    assert "fedcba" not in repr(cluster_secret(environment, alone))
    placed = ClusterConfig(kind="ray", nodes=2, resources={"CPU": 1})
    assert cluster_secret({}, placed).value != cluster_secret({}, placed).value

    def refused(reason: str, cluster: ClusterConfig, **environ: str) -> None:
        with pytest.raises(ConfigError, match=reason) as caught:
            cluster_secret(environ, cluster)
        assert "\n" not in str(caught.value)
        assert not any(value in str(caught.value) for value in environ.values() if value)

    refused("SPOT_ASYNC_CLUSTER_SECRET is not set.*openssl rand -hex 32", alone)
    refused("SPOT_ASYNC_CLUSTER_SECRET: the secret has 5 bytes", alone, **{SECRET_VARIABLE: "short"})
    file.chmod(0o640)
    refused(f"other users can read or write it: chmod 600 {file}", by_file)
    file.chmod(0o600)
    file.write_text("")
    refused("the secret has 0 bytes", by_file)
    file.write_bytes(bytes(range(100, 164)))
    refused("must be printable ASCII", by_file)
    refused("No such file", ClusterConfig(secret_file=tmp_path / "none"))
    os.mkfifo(tmp_path / "fifo", 0o600)
    refused("is no regular file", ClusterConfig(secret_file=tmp_path / "fifo"))
    if os.geteuid() == 0:
        file.write_text("0123456789abcdef")
        os.chown(file, 12345, -1)
        refused("belongs to another user", by_file)
    refused("no regular file|Is a directory", ClusterConfig(secret_file=tmp_path))
