"""The file of a teacher's responses and scores, from which KD can train again without the teacher.

It has a header and one frame per problem. Each is a little-endian length and that many bytes of msgpack with raw arrays
(`spot_async.base.wire`), never pickle. Frames are appended as responses come. So a run that ended early leaves a file
that can be used as far as it goes, or continued by a run with the same settings.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from spot_async.base import wire
from spot_async.base.files import writing
from spot_async.errors import ConfigError, DataError
from spot_async.models.common_vocabulary import swap_tokens
from spot_async.models.vocabulary import tokenizer_fingerprint
from spot_async.types import Generation, IntArray, Judgement, PolicyContext, TokenScores, Verdict

FORMAT_VERSION = 2
LENGTH = struct.Struct("<I")


class Format(msgspec.Struct, frozen=True, kw_only=True):
    """The part of the header that every version has."""

    format_version: int


class Header(Format, frozen=True, kw_only=True):
    """The settings that a reader must agree with, and where the responses come from."""

    vocab_fingerprint: str
    top_k: int
    temperature: float  # of sampling and of all log-probabilities
    top_p: float
    max_response_tokens: int
    teacher: str | None  # its model's directory
    teacher_identity: str | None  # `PolicyContext.teacher_identity`, checked by a run that continues the file


class TeacherResponse(msgspec.Struct, frozen=True, kw_only=True):
    """What the teacher wrote for one problem, and how it scores its own tokens.

    It is kept with the teacher's end token, since another run's student may end with another token than this run's.
    """

    problem_id: str
    prompt_ids: IntArray  # (P,) the prompt that the teacher read
    end_token_id: int  # the teacher's
    response: Generation
    scores: TokenScores | None  # None when no log-probabilities were asked for
    verdict: Judgement | Verdict  # the verdict alone in files of earlier versions

    @property
    def judgement(self) -> Judgement:
        return self.verdict if isinstance(self.verdict, Judgement) else Judgement(self.verdict)

    def respelled(self, end_token_id: int) -> TeacherResponse:
        """Return the response with the teacher's end token and `end_token_id`, the student's, swapped.

        Applied once, it turns a response from stages into the form that is kept. Applied again, it turns that into what
        the student trains on.
        """
        tokens = swap_tokens(self.response.token_ids, end_token_id, self.end_token_id)
        scores = self.scores
        if scores is not None:
            topk_ids = swap_tokens(scores.topk_ids, end_token_id, self.end_token_id)
            scores = msgspec.structs.replace(scores, topk_ids=topk_ids)
        return msgspec.structs.replace(
            self, response=msgspec.structs.replace(self.response, token_ids=tokens), scores=scores
        )


class ResponseFile:
    """A file of responses. Any run can read it (`read`).

    One run writes it, or several with the same settings, one after another (`to_save`, `append`).
    """

    def __init__(self, path: Path, context: PolicyContext, top_k: int, key: str = "policy.load") -> None:
        """`key` is the setting that names the file, for errors."""
        identify = context.teacher_identity if key == "policy.save" else None  # a reader accepts any teacher's file
        self._path = path
        self._key = key
        self._limit = context.vocab_limit or context.vocab_size
        self._unfinished_bytes = 0  # at the file's end, left by a writer that was interrupted
        sampling = context.sampling
        self._header = Header(
            format_version=FORMAT_VERSION,
            vocab_fingerprint=tokenizer_fingerprint(context.tokenizer),
            top_k=top_k,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            max_response_tokens=sampling.max_response_tokens,
            teacher=context.teacher,
            teacher_identity=identify and identify(),
        )

    @classmethod
    def to_save(cls, path: Path, context: PolicyContext, top_k: int) -> tuple[ResponseFile, dict[str, TeacherResponse]]:
        """Return a file to append to, and the responses already in it, by problem. Those are not asked for again.

        Nothing is written before the first new response. Raises ConfigError or DataError.
        """
        if not path.parent.is_dir():
            raise ConfigError(f"policy.save: no directory {str(path.parent)!r} to write {path.name} to")
        file = cls(path, context, top_k, key="policy.save")
        return file, file._saved() if path.exists() else {}

    def _saved(self) -> dict[str, TeacherResponse]:
        header, responses = self._decoded()
        ours = self._header
        if header.teacher_identity != ours.teacher_identity:
            raise ConfigError(
                f"policy.save: {self._path} holds responses of another teacher ({header.teacher or 'unnamed'}) than "
                f"teacher.model={ours.teacher}: weights, served_model or request_fields differ; train from it with "
                "policy.load or give another file"
            )
        if msgspec.structs.replace(header, teacher=ours.teacher) != ours:  # the teacher's directory may have moved
            raise ConfigError(
                f"policy.save: {self._path} exists already with responses {_origin(header)} and its top-{header.top_k} "
                "that are not this run's; train from it with policy.load or give another"
            )
        return {response.problem_id: response for response in responses}

    def append(self, response: TeacherResponse) -> None:
        """Write a response to the end of the file. Raises StorageError when that fails."""
        with writing(self._path), self._path.open("ab") as file:
            if self._unfinished_bytes:
                file.truncate(file.tell() - self._unfinished_bytes)
                self._unfinished_bytes = 0
            if file.tell() == 0:
                file.write(_frame(self._header))
            file.write(_frame(response))

    def read(self) -> dict[str, TeacherResponse]:
        """Return all responses by problem. Raises ConfigError or DataError if the file does not fit this run."""
        header, responses = self._decoded()
        self._check(header)
        self._check_lengths(header, responses)
        return {response.problem_id: response for response in responses}

    def _decoded(self) -> tuple[Header, list[TeacherResponse]]:
        try:
            data = self._path.read_bytes()
        except OSError as error:
            raise ConfigError(f"{self._key}: cannot read {self._path}: {error.strerror}") from None
        try:
            head, *frames = list(_frames(data)) or [memoryview(b"")]
            self._check_format(wire.decode(head, Format))
            header = wire.decode(head, Header)
            responses = [wire.decode(frame, TeacherResponse) for frame in frames]
        except (msgspec.DecodeError, ValueError, TypeError) as error:
            raise DataError(f"{self._key}: {self._path} is no file of teacher responses: {error}") from None
        self._check_tokens(responses)
        self._unfinished_bytes = len(data) - sum(LENGTH.size + len(frame) for frame in [head, *frames])
        return header, responses

    def _check_format(self, found: Format) -> None:
        if found.format_version != FORMAT_VERSION:
            raise DataError(
                f"{self._key}: {self._path} has format {found.format_version}, this version reads {FORMAT_VERSION}; "
                "write another with policy.save"
            )

    def _check(self, found: Header) -> None:
        ours = self._header
        if found.vocab_fingerprint != ours.vocab_fingerprint:
            raise DataError(f"policy.load: {self._path} was written with another vocabulary than the student's")
        if found.top_k < ours.top_k:
            raise ConfigError(
                f"policy.top_k={ours.top_k}: {self._path} holds the teacher's top-{found.top_k}; "
                + (
                    f"set it to {found.top_k} or less"
                    if found.top_k
                    else "set policy.forward_kl_weight=0, or load another"
                )
            )
        if found.temperature != ours.temperature:
            raise ConfigError(
                f"sampling.temperature={ours.temperature:g}: {self._path} holds responses and log-probabilities "
                f"{_origin(found)}; set it to {found.temperature:g} or load another file"
            )

    def _check_tokens(self, responses: Sequence[TeacherResponse]) -> None:
        """Refuse ids that this run's models do not have: the file's student may have had a wider softmax."""
        for each in responses:
            largest = max(ids.max(initial=0) for ids in (each.response.token_ids, *_candidates(each)))
            if largest >= self._limit:
                raise DataError(
                    f"{self._key}: {self._path} names token {largest} for problem {each.problem_id!r}, and this run's "
                    f"models have {self._limit} in common: it was written for a wider student; write another"
                )

    def _check_lengths(self, found: Header, responses: Sequence[TeacherResponse]) -> None:
        """Refuse responses longer than this run's limit, by which room in queue and context is reserved."""
        allowed = self._header.max_response_tokens
        longest = max(responses, key=lambda each: len(each.response.token_ids), default=None)
        if longest is not None and len(longest.response.token_ids) > allowed:
            raise ConfigError(
                f"sampling.max_response_tokens={allowed}: {self._path} holds a response of "
                f"{len(longest.response.token_ids)} tokens to problem {longest.problem_id!r}, {_origin(found)}; "
                f"set it to {found.max_response_tokens} or load another file"
            )


def _origin(header: Header) -> str:
    return (
        f"of {header.teacher or 'a teacher'} at temperature {header.temperature:g}, top_p {header.top_p:g}, "
        f"max_response_tokens {header.max_response_tokens}"
    )


def _candidates(response: TeacherResponse) -> Sequence[IntArray]:
    return () if response.scores is None else (response.scores.topk_ids,)


def _frame(record: msgspec.Struct) -> bytes:
    data = wire.encode(record)
    return LENGTH.pack(len(data)) + data


def _frames(data: bytes) -> Iterator[memoryview]:
    """Yield all whole frames. Skip an unfinished one at the end, which an interrupted writer left."""
    view, start = memoryview(data), 0
    while start + LENGTH.size <= len(view):
        (size,) = LENGTH.unpack_from(view, start)
        start += LENGTH.size
        if start + size > len(view):
            return
        yield view[start : start + size]
        start += size
