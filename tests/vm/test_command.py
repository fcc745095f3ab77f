"""The installed command on a machine without a cluster: real modules, mounts and processes, from plan to exit code."""

from __future__ import annotations

import os
import time

from tests.vm.command import ALL, assert_free, assert_untouched, command, driver_in_use
from tests.vm.guest import in_guest, vm
from tests.vm.inside import DRIVER, DRIVER_ROOT, end, here, holding, load, loaded, mapped, opened, refcount, write
from tests.vm.machine import Guest


@in_guest
def test_a_machine_is_freed() -> None:
    """Modules and mounts go, exit code 0, no record is left; a second run has nothing to do."""
    driver_in_use()
    assert_free(command("uninstall_driver"))
    assert_free(command("uninstall_driver"))


@in_guest
def test_a_plan_changes_nothing() -> None:
    """It names the holder, and all is as before."""
    driver_in_use()
    with holding(opened()) as pid:
        assert_untouched(command("plan"), 0, str(pid), "/dev/nvidia0")


@in_guest
def test_an_open_device_keeps_all_of_it() -> None:
    """Process and device are named; not one module goes while it is held."""
    driver_in_use()
    with holding(opened()) as pid:
        assert_untouched(command("uninstall_driver", HOLDER_TIMEOUT="1s"), 75, f"{pid}", "/dev/nvidia0")


@in_guest
def test_a_mapping_keeps_all_of_it() -> None:
    """The same for a mapping whose descriptor is closed."""
    driver_in_use()
    with holding(mapped()) as pid:
        assert_untouched(command("uninstall_driver", HOLDER_TIMEOUT="1s"), 75, f"{pid}", "/dev/nvidia0")


@in_guest
def test_a_holder_that_ends_is_waited_for() -> None:
    """Once it has ended, the rest follows at once."""
    driver_in_use()
    with holding(opened()) as holder:
        done = command("uninstall_driver")
        done.hear(str(holder))
        assert loaded() == ALL
    assert_free(done)


@in_guest
def test_a_holder_that_closes_and_lives_on_is_noticed() -> None:
    """The end of a process can be heard, a close cannot: a look every few seconds finds it."""
    driver_in_use()
    holder = os.fork()
    if not holder:
        descriptor = opened()()
        time.sleep(2)
        os.close(descriptor)
        time.sleep(60)
        os._exit(0)
    while not refcount("nvidia") > 2:
        time.sleep(0.02)
    assert_free(command("uninstall_driver"))
    end(holder)


@in_guest
def test_a_driver_that_lingers_is_tried_again() -> None:
    """A module that refuses for two seconds after the last close, with no holder to be seen, then goes."""
    load("nvidia", linger_ms=2000)
    load(*DRIVER[1:])
    with holding(opened()):
        pass
    assert_free(command("uninstall_driver"))


@in_guest
def test_use_without_a_holder_is_said() -> None:
    """A module in use by nobody that can be seen: that is what it says, and it is no success."""
    load("nvidia", linger_ms=30000)
    with holding(opened()):
        pass
    done = command("uninstall_driver", UNLOAD_TIMEOUT="1s", HOLDER_TIMEOUT="1s")
    assert done.code() == 75, done.said
    assert loaded() == {"nvidia"}
    assert "no process that holds it can be seen" in done.said, done.said


@in_guest
def test_a_module_of_somebody_else_is_refused_or_removed() -> None:
    """Refused by name before anything goes; removed first where a setting names it."""
    driver_in_use()
    load("acme-monitor")
    refused = command("uninstall_driver")
    assert_untouched(refused, 65, "acme_monitor", "UNLOAD_ALSO")
    assert_free(command("uninstall_driver", UNLOAD_ALSO="acme_monitor"))


@in_guest
def test_a_kernel_that_unloads_nothing_is_found_first() -> None:
    """modules_disabled: 71 with the reason, nothing touched."""
    driver_in_use()
    assert write("/proc/sys/kernel/modules_disabled", "1") == 0
    assert_untouched(command("uninstall_driver"), 71, "modules_disabled")


@in_guest
def test_a_root_in_use_is_detached_or_refused() -> None:
    """By default its user lives on with a detached root."""
    driver_in_use()
    with holding(lambda: os.chdir(f"{DRIVER_ROOT}/sub dir")):
        assert_free(command("uninstall_driver"))


@in_guest
async def test_the_host_is_unchanged_by_a_look() -> None:
    """Looks and scans take no reference and leave no child."""
    load(*DRIVER)
    before = refcount("nvidia")
    await here().look()
    await here().holders()
    assert refcount("nvidia") == before


@vm
def test_the_installed_program(guest: Guest) -> None:
    """The real command line, as a process of its own: frees the machine with 0; an unknown flag is 64; a bad value is 78."""
    guest.call("tests.vm.command", "driver_in_use")
    freed = guest.run("driver-manager", "uninstall_driver", "--no-cluster")
    assert freed.code == 0, freed.err
    assert guest.call("tests.vm.inside", "left") == [[], []]
    assert guest.run("driver-manager", "uninstall_driver", "--nothing").code == 64
    bad = guest.run("driver-manager", "uninstall_driver", "--no-cluster", env={"HOLDER_TIMEOUT": "soon"})
    assert bad.code == 78
    assert "HOLDER_TIMEOUT" in bad.err
