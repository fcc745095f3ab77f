"""The way to the API server and back: requests as bytes over the client library's transport, with its credentials.

Only this file and `configuration` touch the libraries, and only `client.open_connection` imports it: loading them takes most of
the start-up. It knows nothing of Kubernetes objects. Neither tokens nor bodies are ever logged.
"""

import asyncio
import logging
import ssl
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import aiohttp
from kubernetes.aio.client.configuration import Configuration
from kubernetes.aio.client.rest import RESTClientObject
from kubernetes.aio.config import ConfigException

from driver_manager import __version__
from driver_manager.errors import ConfigError, Forbidden, Unreachable
from driver_manager.kube.calls import Call
from driver_manager.kube.configuration import load_configuration
from driver_manager.kube.refusals import refusal

logger = logging.getLogger(__name__)

_BROKEN: Final = (aiohttp.ClientError, OSError, TimeoutError)
"""How the transport says that there is no answer. TLS failures are among the first two."""
_NO_ANSWER: Final = "is the API server up, and is that its address, as seen from here? The kubeconfig or the pod's environment gives it"


class Connection:
    """Open connections to one API server, as one account."""

    def __init__(self, configuration: Configuration, kubeconfig: str | None, request_timeout: float) -> None:
        self._kubeconfig = kubeconfig
        self._timeout = request_timeout
        self._configuration = configuration
        self._refreshing = asyncio.Lock()
        self._rest = RESTClientObject(configuration)

    @classmethod
    async def open(cls, kubeconfig: str | None, request_timeout: float, connections: int) -> "Connection":
        """Gets everything ready for the first request, without making one; opens at most so many connections.

        Raises:
            ConfigError: the configuration is missing or cannot be used.
        """
        configuration = await load_configuration(kubeconfig)
        configuration.connection_pool_maxsize = connections
        try:
            return cls(configuration, kubeconfig, request_timeout)
        except (OSError, ssl.SSLError) as error:
            source = kubeconfig or "the service account"
            raise ConfigError(f"{source}: a certificate or key cannot be used: {error.strerror or error}") from error

    async def token(self) -> str:
        """The bearer token, empty where the account has none."""
        kind, _, token = (await self._authorization()).partition(" ")
        return token if kind.lower() == "bearer" else ""

    async def answer(self, call: Call) -> bytes:
        """Sends a request and gives the body of a successful answer.

        Raises:
            ClusterError: as `refusals` tells.
        """
        started = time.monotonic()
        response = await self._send(call, self._timeout)
        try:
            async with response:
                body = await response.read()
        except _BROKEN as error:
            raise self._unreachable(call, error) from error
        took = round(time.monotonic() - started, 3)
        logger.debug("request", extra={"call": str(call), "status": response.status, "took_seconds": took})
        if not response.ok:
            raise refusal(call, response.status, body, response.headers.get("Retry-After", ""))
        return body

    @asynccontextmanager
    async def lines(self, call: Call, seconds: float) -> AsyncIterator[AsyncGenerator[bytes, None]]:
        """Sends a request whose answer comes line by line, for at most so many seconds; closes it on any way out.

        Raises:
            ClusterError: as `refusals` tells; also while the lines are read.
        """
        response = await self._send(call, seconds)
        try:
            if not response.ok:
                raise refusal(call, response.status, await self._rest_of(call, response), response.headers.get("Retry-After", ""))
            yield self._split(call, response, seconds)
        finally:
            response.close()

    async def close(self) -> None:
        """Closes all connections."""
        await self._rest.close()

    async def _send(self, call: Call, seconds: float) -> aiohttp.ClientResponse:
        """Sends a request, a second time if other credentials are to be had than the ones refused.

        An answer 401 was made before anything was done, so that is safe for writes too.
        """
        sent_as = await self._authorization()
        response = await self._send_as(sent_as, call, seconds)
        if response.status == 401 and await self._has_other_credentials(sent_as):
            response.release()
            response = await self._send_as(await self._authorization(), call, seconds)
        return response

    async def _send_as(self, authorization: str, call: Call, seconds: float) -> aiohttp.ClientResponse:
        headers = {
            "Accept": "application/json",
            "Content-Type": call.content_type,
            "User-Agent": f"driver-manager/{__version__}",
        }
        if authorization:
            headers["Authorization"] = authorization
        try:
            async with asyncio.timeout(self._timeout):
                answer = await self._rest.request(  # type: ignore[no-untyped-call]
                    call.method,
                    self._configuration.host.rstrip("/") + call.target,
                    headers=headers,
                    body=call.body,
                    _request_timeout=aiohttp.ClientTimeout(total=seconds),
                )
        except _BROKEN as error:
            raise self._unreachable(call, error) from error
        response: aiohttp.ClientResponse = answer.response
        return response

    async def _authorization(self) -> str:
        """The header's value; the library reads a service account's token file again every minute."""
        try:
            value = await self._configuration.get_api_key_with_prefix("BearerToken", alias="authorization")
        except (ConfigException, OSError) as error:
            raise Forbidden(f"the service account's token cannot be read: {error}") from error
        value = (value or "").strip()
        if not value.isprintable():
            raise Forbidden("the token holds characters that no token has", hint="check where the token comes from")
        return value

    async def _has_other_credentials(self, refused: str) -> bool:
        """Reads a kubeconfig again: a token file may have been replaced, a credential plugin's token have expired."""
        if self._kubeconfig is None:
            return False
        async with self._refreshing:
            if await self._authorization() == refused:
                try:
                    self._configuration.api_key = (await load_configuration(self._kubeconfig)).api_key
                except ConfigError as error:
                    logger.warning("the kubeconfig cannot be read again", extra={"error": error.message})
            return await self._authorization() != refused

    async def _rest_of(self, call: Call, response: aiohttp.ClientResponse) -> bytes:
        try:
            async with asyncio.timeout(self._timeout):
                return await response.read()
        except _BROKEN as error:
            raise self._unreachable(call, error) from error

    async def _split(self, call: Call, response: aiohttp.ClientResponse, seconds: float) -> AsyncGenerator[bytes, None]:
        """The lines of a body of any length; what follows the last line end is not a line."""
        pieces: list[bytes] = []
        try:
            async for chunk in response.content.iter_any():
                head, *lines = chunk.split(b"\n")
                pieces.append(head)
                for line in lines:
                    yield b"".join(pieces)
                    pieces = [line]
        except _BROKEN as error:
            raise self._unreachable(call, error, seconds) from error

    def _unreachable(self, call: Call, error: Exception, seconds: float = 0.0) -> Unreachable:
        server = self._configuration.host
        if isinstance(error, TimeoutError):
            return Unreachable(f"{call}: no answer from {server} within {seconds or self._timeout:g} s", hint=_NO_ANSWER)
        cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
        hint = _NO_ANSWER
        if isinstance(error, aiohttp.ClientConnectorCertificateError):
            cause = error.certificate_error
        if isinstance(error, aiohttp.ClientSSLError):
            hint = "check the cluster's certificate authority and the server's name in the kubeconfig"
        unreachable = Unreachable(f"{call}: no answer from {server}: {cause or type(cause).__name__}", hint=hint)
        unreachable.transient = not isinstance(error, aiohttp.ClientConnectorCertificateError)
        return unreachable
