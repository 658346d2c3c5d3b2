"""The CPU as two devices, so that drafters and their target have one each."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from modelpool.device_manager import DeviceInfo


def two_devices() -> list[DeviceInfo]:
    """The target, which is placed first, is alone on its own; drafters are smaller than it."""
    return [DeviceInfo("cpu:0", 2**34 + 1, 2**34), DeviceInfo("cpu:1", 2**34, 2**34)]


@contextmanager
def cpu_as_two_devices() -> Iterator[None]:
    """For pools that are made meanwhile."""
    with mock.patch("modelpool.device_manager.read_devices", two_devices):
        yield
