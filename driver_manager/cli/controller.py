"""The command `controller`: settings from words, the policy file, and one replica from its start to its end."""

import asyncio
import logging
import socket
import sys
from pathlib import Path
from typing import Final

from driver_manager import logs
from driver_manager.cli.commands import run_until_done
from driver_manager.cli.main import show_error
from driver_manager.clock import SystemClock
from driver_manager.config import Settings
from driver_manager.controller.run import Replica
from driver_manager.controller.serving import serving
from driver_manager.controller.settings import ControllerSettings, MaintenanceSettings
from driver_manager.core.policy_text import plain_values
from driver_manager.core.role import Choice
from driver_manager.core.situation import RolloutSettings
from driver_manager.core.upgrade_policy import BadPolicy, UpgradePolicy, read_policy
from driver_manager.errors import ConfigError, DriverManagerError, Exit
from driver_manager.fleetconfig import CONTROLLER_OPTIONS, SHARED, FleetWords, check_times
from driver_manager.ports import Clock

logger = logging.getLogger(__name__)

OWN_NAMESPACE: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
"""Where a pod finds the namespace of its account."""
ROLLOUT: Final = "rollout."
MAINTENANCE: Final = "maintenance."


def controller_settings(words: FleetWords, clock: Clock, own_namespace: Path = OWN_NAMESPACE) -> ControllerSettings:
    """The settings that follow from the words, with what a replica finds out about itself.

    Raises:
        ConfigError: values that do not go together, or a policy file that cannot be used.
    """
    given = dict(words.own)
    rollout = {name.removeprefix(ROLLOUT): given.pop(name) for name in list(given) if name.startswith(ROLLOUT)}
    maintenance = {name.removeprefix(MAINTENANCE): given.pop(name) for name in list(given) if name.startswith(MAINTENANCE)}
    policy_file = given.pop("policy_file", "")
    given["role"] = Choice(given.get("role", Choice.AUTO))
    given.setdefault("identity", f"{socket.gethostname() or 'controller'}-{clock.run_id()}")
    if "lease_namespace" not in given and (found := _namespace(own_namespace)):
        given["lease_namespace"] = found
    agent = Settings(**words.shared)
    settings = ControllerSettings(
        operator_namespace=agent.operator_namespace,
        policy=read_policy_file(policy_file) if policy_file else None,
        maintenance=MaintenanceSettings(**maintenance),
        rollout=RolloutSettings(**rollout),
        agent=agent,
        **given,
    )
    check_times(settings.lease_duration, settings.renew_deadline, settings.retry_period, settings.request_timeout)
    return settings


def _namespace(file: Path) -> str:
    try:
        return file.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""


def read_policy_file(name: str) -> UpgradePolicy:
    """Reads an upgrade policy from a file in YAML or JSON.

    Raises:
        ConfigError: it cannot be read, or with all that is wrong in it, by field.
    """
    what = f"the policy file {name}"
    try:
        raw = plain_values(Path(name).read_text())
    except OSError as error:
        raise ConfigError(f"{what} cannot be read: {error.strerror}", hint="--policy-file: see docs/controller.md") from error
    except ValueError as error:
        raise ConfigError(f"{what} is neither YAML nor JSON: {error}", hint="docs/controller.md has an example") from error
    if raw is None:
        raise ConfigError(f"{what} is empty", hint="its least content is: autoUpgrade: true")
    try:
        return read_policy(raw)
    except BadPolicy as error:
        hint = "it holds the fields of a policy, at its top level; docs/controller.md has an example"
        raise ConfigError(f"{what} is not valid: {error}", hint=hint) from error


def run_controller(words: FleetWords) -> int:
    """Leads the fleet, or waits for its turn to, until a signal ends it (exit code 0) or the Lease is lost (75)."""
    clock = SystemClock()
    settings = controller_settings(words, clock)
    logs.set_up(settings.agent.log_format, settings.agent.log_level)
    logger.info("settings", extra=_in_words(settings, words))
    try:
        return run_until_done(lambda stop: _serve(settings, clock, stop))
    except DriverManagerError as error:
        if sys.stderr.isatty():
            show_error(error.message, error.hint)
        else:
            told = {"exit": int(error.exit_code), "result": error.message}
            logger.error("end", extra=told | ({"hint": error.hint} if error.hint else {}))  # noqa: TRY400 - no bug: no trace
        return int(error.exit_code)


async def _serve(settings: ControllerSettings, clock: Clock, stop: asyncio.Event) -> int:
    from driver_manager.kube.fleet import connect_fleet
    from driver_manager.kube.fleetcalls import Selection

    selection = Selection(
        namespace=settings.operator_namespace,
        nodes=settings.node_selector,
        maintenances=settings.maintenance.namespace if settings.maintenance.is_on else "",
    )
    fleet = await connect_fleet(settings.agent.kubeconfig or None, clock, selection, request_timeout=settings.request_timeout)
    try:
        replica = Replica(fleet, clock, settings)
        async with serving(replica, settings.listen):
            await _until_stopped(replica, stop)
    finally:
        await fleet.close()
    logger.info("end", extra={"exit": int(Exit.DONE), "result": "stopped by a signal"})
    return int(Exit.DONE)


async def _until_stopped(replica: Replica, stop: asyncio.Event) -> None:
    """Runs a replica; a signal has it finish what is under way and give up the Lease."""
    running, stopped = asyncio.ensure_future(replica.run()), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({running, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            running.result()
    finally:
        stopped.cancel()
        running.cancel()
        await asyncio.wait({running})


def _in_words(settings: ControllerSettings, words: FleetWords) -> dict[str, str]:
    """Every limit, and every value that is not the default, with where it comes from."""
    lease = f"{settings.lease_namespace}/{settings.lease_name}"
    said = {"identity": settings.identity, "lease": lease, "listen": settings.listen or "none"}
    for option in (*CONTROLLER_OPTIONS, *SHARED):
        value = words.own.get(option.field, words.shared.get(option.field))
        if (origin := words.origins.get(option.field)) is not None:
            said[option.env] = f"{option.in_words(value)} ({origin})"
        elif option.kind.sign == "DURATION":
            said[option.env] = f"{option.default} (default)"
    return said
