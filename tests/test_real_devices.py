"""Gamepad, keyboard, SpaceMouse as devices of the kernel. Where it has no uinput or uhid, `.ci/devices` runs
this in a virtual machine."""

import os
from dataclasses import replace

import numpy as np
import pytest
from kernel_devices import SPACE_MOUSE, UhidDevice, UinputDevice, wait_for
from streams import NORTH, SYN, TR, WEST, event, key

from robo_rl.errors import UserError
from robo_rl.human.device_files import find_device
from robo_rl.human.device_mapping import DEFAULTS
from robo_rl.human.devices import DeviceOperator, open_device
from robo_rl.human.intervention import CORRECTION, PAUSE, OperatorView
from robo_rl.types import ActionAxis, ControlSpec

VM = "may not be written here (.ci/devices runs this in a virtual machine)"
uinput = pytest.mark.skipif(
    not os.access("/dev/uinput", os.W_OK), reason=f"/dev/uinput is not there, or {VM}"
)
uhid = pytest.mark.skipif(not os.access("/dev/uhid", os.W_OK), reason=f"/dev/uhid is not there, or {VM}")
W, G = 17, 34
X, Y = 0, 1
PAD_AXES = {X: (128, 0, 255), Y: (128, 0, 255)}
SPEC = ControlSpec(
    "toy",
    "t",
    (
        *(ActionAxis(n, "m", -0.02, 0.02, "delta", "base") for n in ("dx", "dy", "dz")),
        ActionAxis("gripper", "m", 0.0, 0.08, "absolute"),
    ),
    0.02,
    100,
)


def pad(vendor=0x054C):
    return UinputDevice("robo_rl test pad", (TR, NORTH, WEST), PAD_AXES, vendor=vendor)


def keep_reading(device, until):
    """Readings until one fits: the kernel hands events over in its own time."""

    def look():
        got = device.read()
        return got if until(got) else None

    return wait_for(look)


@uinput
def test_a_gamepad_of_the_kernel_is_read_with_its_own_ranges_and_is_gone_once_destroyed():
    with pad() as made:
        device = open_device(f"gamepad:{made.path}")
        made.write(event(3, Y, 0) + SYN)
        assert not keep_reading(device, lambda _: device.values.get("ABS_Y") == -1).engaged
        made.write(key(TR) + SYN)
        assert np.allclose(keep_reading(device, lambda r: r.engaged).twist, [1, 0, 0, 0, 0, 0])
        made.write(key(NORTH) + SYN)
        assert keep_reading(device, lambda r: r.marks).marks == ("success",)
    assert not device.read().engaged and device.gone
    device.close()


@uinput
@pytest.mark.parametrize("vendor, code", [(0x054C, NORTH), (0x045E, WEST)])
def test_the_vendor_of_a_gamepad_says_which_code_its_upper_button_has(vendor, code):
    with pad(vendor) as made:
        device = open_device(f"gamepad:{made.path}")
        made.write(key(code) + SYN)
        assert keep_reading(device, lambda r: r.marks).marks == ("success",)
        device.close()


@uinput
@pytest.mark.parametrize("held", [True, False])
def test_after_the_kernel_dropped_events_buttons_and_axes_are_what_they_are_now(held):
    with pad() as made:
        device = open_device(f"gamepad:{made.path}")
        made.write(key(TR) + event(3, Y, 0) + SYN)
        keep_reading(device, lambda r: r.engaged)
        for i in range(4000):  # nobody reads: the buffer of the file overflows
            made.write(event(3, X, i % 200) + SYN)
        if not held:
            made.write(key(TR, 0) + SYN)
        made.write(event(3, Y, 255) + SYN)
        got = keep_reading(device, lambda _: device.values.get("ABS_Y") == 1)
        assert device.source.dropped is False and got.engaged is held
        assert np.allclose(got.twist[0], -1 if held else 0)
        device.close()


@uinput
def test_a_key_that_is_held_repeats_and_is_one_press_until_it_is_up():
    with UinputDevice("robo_rl test keyboard", (W, G), repeats=True) as made:
        device = open_device(f"keyboard:{made.path}")
        made.write(key(G) + key(W) + SYN)
        assert keep_reading(device, lambda r: r.engaged).grip == -1
        made.write(key(G, 2) + SYN + key(G, 2) + SYN)
        got = keep_reading(device, lambda r: True)
        assert got.engaged and got.grip == -1 and np.allclose(got.twist, [1, 0, 0, 0, 0, 0])
        made.write(key(W, 0) + key(G, 0) + SYN)
        keep_reading(device, lambda r: not r.engaged)
        device.close()


@uinput
def test_a_gamepad_that_is_pulled_out_pauses_the_robot_and_helps_again_once_it_is_back_and_held():
    view = OperatorView(np.zeros((1, 4)), np.zeros((1, 4)), np.zeros(1, bool), np.ones(1, int))
    made = pad()
    path, clock = [made.path], [0.0]
    operator = DeviceOperator(
        open_device(f"gamepad:{made.path}"),
        SPEC,
        1,
        clock=lambda: clock[0],
        reopen=lambda: open_device(f"gamepad:{path[0]}"),
    )

    def phase():
        clock[0] += 2.0
        return int(operator.intervene(view).phase[0])

    made.write(key(TR) + event(3, Y, 0) + SYN)
    wait_for(lambda: phase() == CORRECTION)
    made.close()
    assert phase() == PAUSE
    with pad() as back:
        path[0] = back.path
        clock[0] += 2.0
        assert phase() != CORRECTION
        back.write(key(TR) + SYN)
        wait_for(lambda: phase() == CORRECTION)
    operator.device.close()


@uhid
def test_a_space_mouse_of_the_kernel_is_found_read_by_its_hidraw_file_and_gone_once_unplugged():
    with pytest.raises(UserError, match="no spacemouse is plugged in"):
        find_device("spacemouse")
    with UhidDevice("3Dconnexion SpaceMouse", 0x256F, 0xC635, SPACE_MOUSE) as made:
        assert find_device("spacemouse") == made.path
        device = open_device("spacemouse")
        device.mapping = replace(DEFAULTS["spacemouse"], dead_zone=0.0)
        made.write(bytes([1]) + np.array([0, -350, 175], "<i2").tobytes())
        assert np.allclose(keep_reading(device, lambda r: r.engaged).twist, [1, 0, -0.5, 0, 0, 0])
        made.write(bytes([2]) + np.array([0, 0, -350], "<i2").tobytes())
        keep_reading(device, lambda r: np.allclose(r.twist, [1, 0, -0.5, 0, 0, 1]))
        made.write(bytes([3, 3, 0]))
        got = keep_reading(device, lambda r: r.marks)
        assert got.grip == -1 and got.marks == ("success",)
    keep_reading(device, lambda r: device.gone)
    assert not device.read().engaged
    device.close()
