"""How the REST door reads HTTP: uvicorn's protocol, where it needs to be another."""

from __future__ import annotations

from collections.abc import Iterable

import httptools
import orjson
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gateway.openai import error_body

_BODY = (b"content-length", b"transfer-encoding")


class RestProtocol(HttpToolsProtocol):
    """Refuses in OpenAI's body what is not HTTP, and takes no offer to speak anything else.

    Some clients offer HTTP/2 with each request (Java's does). A server may ignore that, and then
    owes an answer to the request as it is (RFC 9110, 7.8); but httptools leaves all that follows
    such a header to the protocol offered, the body first. So another parser, told how the body
    ends, goes on there.
    """

    _resuming = False  # the parser reads what we told it of a request that has begun

    def send_400_response(self, msg: str) -> None:
        """Refuses what cannot be read, and closes the connection."""
        body = orjson.dumps(error_body(f"request: {msg}", "invalid_request_error"))
        self.transport.write(
            b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\nconnection: close\r\n\r\n%b" % (len(body), body)
        )
        self.transport.close()

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        try:
            self._read(data)
        except httptools.HttpParserError:
            self.logger.warning("a request is not HTTP")
            self.send_400_response("Invalid HTTP request received.")

    def on_message_begin(self) -> None:
        if not self._resuming:
            super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        if not self._resuming:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._resuming:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if not self._resuming:
            super().on_headers_complete()

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():  # else its body is yet to come
            super().on_message_complete()

    def _read(self, data: bytes) -> None:
        while data:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as offer:
                if self.scope["method"] == "CONNECT":
                    raise httptools.HttpParserError("this is no proxy") from None
                self._resume(header for header in self.headers if header[0] in _BODY)
                data = data[offer.args[0] :]

    def _resume(self, ends: Iterable[tuple[bytes, bytes]]) -> None:
        """Goes on with the body of the present request, of whose header it needs `ends` only."""
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self._resuming = True
        head = b"".join(b"%b: %b\r\n" % header for header in ends)
        self.parser.feed_data(b"POST / HTTP/1.1\r\n%b\r\n" % head)
        self._resuming = False
