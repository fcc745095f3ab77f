"""Where the API server is and who we are, read by the client library from a kubeconfig or the pod's service account.

Nothing of a kubeconfig gets into a message but names of files and keys: the library's own messages can hold whole
entries, with their secrets.
"""

import asyncio
import os
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import yaml  # type: ignore[import-untyped,unused-ignore]  # what the library reads kubeconfigs with
from kubernetes.aio.client.configuration import Configuration
from kubernetes.aio.config import ConfigException, load_incluster_config, load_kube_config

from driver_manager.errors import ConfigError

PLUGIN_SECONDS: Final = 30.0
"""How long a credential plugin of a kubeconfig may take."""

_MALFORMED: Final = (AttributeError, TypeError, KeyError, ValueError)
"""What the library's reader raises where an entry has another shape than it expects."""
_HINT: Final = "KUBECONFIG or --kubeconfig names the file: try it with `kubectl --kubeconfig FILE get nodes`"


async def load_configuration(kubeconfig: str | None) -> Configuration:
    """Reads the configuration from files named as in $KUBECONFIG, or from the pod we run in.

    Raises:
        ConfigError: it is missing or cannot be used.
    """
    configuration = Configuration()
    if kubeconfig is None:
        try:
            load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
        except (ConfigException, OSError) as error:
            raise ConfigError(
                f"no kubeconfig is given, and this is no pod of a cluster: {error}",
                hint="set KUBECONFIG or --kubeconfig; ~/.kube/config is not taken by itself",
            ) from error
        return configuration
    await _load_files(kubeconfig, configuration)
    _check_server(kubeconfig, configuration.host)
    return configuration


async def _load_files(kubeconfig: str, configuration: Configuration) -> None:
    paths = [Path(path).expanduser() for path in kubeconfig.split(os.pathsep) if path]
    if not any(path.exists() for path in paths):
        raise _broken(kubeconfig, "there is no such file")
    try:
        async with asyncio.timeout(PLUGIN_SECONDS):
            await load_kube_config(  # type: ignore[no-untyped-call]
                config_file=kubeconfig, client_configuration=configuration, persist_config=False
            )
    except ConfigException as error:
        raise _broken(kubeconfig, str(error).partition("{")[0].rstrip(" /")) from None
    except TimeoutError as error:
        raise _broken(kubeconfig, f"its credential plugin gave no answer in {PLUGIN_SECONDS:.0f} s") from error
    except yaml.MarkedYAMLError as error:
        where = f" in line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise _broken(kubeconfig, f"it is not YAML{where}") from None
    except yaml.YAMLError:
        raise _broken(kubeconfig, "it is not YAML") from None
    except OSError as error:
        raise _broken(kubeconfig, f"{error.strerror or error}: {error.filename or 'a file it names'}") from error
    except _MALFORMED as error:
        raise _broken(kubeconfig, f"it is empty, or not a kubeconfig ({type(error).__name__} while reading)") from None


def _broken(kubeconfig: str, what: str) -> ConfigError:
    return ConfigError(f"kubeconfig {kubeconfig}: {what}", hint=_HINT)


def _check_server(kubeconfig: str, server: str) -> None:
    try:
        url = urlsplit(server)
        is_usable = url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
    except ValueError:
        is_usable = False
    if not is_usable:
        raise _broken(kubeconfig, f"the current context names no usable server: {server!r}")
