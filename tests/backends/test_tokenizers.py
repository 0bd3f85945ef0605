"""A server's tokenizer is compared with that of the directory, where the server has one."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
from structlog.testing import capture_logs

from spot_async.backends.shared.discovery import compare_tokenizers
from spot_async.errors import Exchange, PermanentError


@pytest.mark.parametrize(
    ("status", "may_refuse", "warns"), [(404, False, True), (400, False, False), (400, True, True), (404, True, True)]
)
async def test_a_refusal_to_tokenize_is_an_error_unless_the_kind_of_server_may_refuse(status, may_refuse, warns):
    class Refusing:
        role = "teacher"

        async def post(self, path, body, kind, *, deadline):
            error = PermanentError("teacher: refused")
            error.exchange = Exchange("http://h", "POST", path, 0, body, status)
            raise error

    with capture_logs() as logs, nullcontext() if warns else pytest.raises(PermanentError, match="refused"):
        await compare_tokenizers(Refusing(), ["text"], deadline=0.0, may_refuse=may_refuse)
    assert [line["event"] for line in logs] == ["tokenizers not compared"] * warns
