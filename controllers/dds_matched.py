"""Who an endpoint of Cyclone DDS is matched with, by its Python binding of 11, or of 0.10, which is what can
be built for DDS Security.

The binding of 0.10 has no words for it: there the same functions of the C library are called.
"""

import ctypes
from dataclasses import dataclass
from typing import Any
from uuid import UUID


@dataclass(frozen=True, slots=True)
class MatchedEndpoint:
    """The endpoint on the other side: its GUID and quality of service."""

    key: UUID
    qos: Any


class BuiltinEndpoint(ctypes.Structure):
    """dds_builtintopic_endpoint of Cyclone's dds.h."""

    _fields_ = (
        ("key", ctypes.c_uint8 * 16),
        ("participant", ctypes.c_uint8 * 16),
        ("handle", ctypes.c_uint64),
        ("topic", ctypes.c_char_p),
        ("type", ctypes.c_char_p),
        ("qos", ctypes.c_void_p),
    )


def matched(entity: Any, what: str) -> list[int]:
    """Handles of the endpoints that a reader (what: publication) or a writer (subscription) is matched
    with."""
    own = getattr(entity, f"get_matched_{what}s", None)
    if own is not None:
        return own()
    call = getattr(entity._dll_handle, f"dds_get_matched_{what}s")
    call.argtypes, call.restype = (
        [ctypes.c_int32, ctypes.POINTER(ctypes.c_uint64), ctypes.c_size_t],
        ctypes.c_int32,
    )
    room = 16
    while True:
        handles = (ctypes.c_uint64 * room)()
        count = call(entity._ref, handles, room)
        if count <= room:
            return list(handles[: max(0, count)])
        room = count


def matched_endpoint(entity: Any, what: str, handle: int) -> Any:
    """The endpoint with `key` and `qos`; None: it has left."""
    own = getattr(entity, f"get_matched_{what}_data", None)
    if own is not None:
        return own(handle)
    from cyclonedds.qos import _CQos

    library = entity._dll_handle
    call, free = getattr(library, f"dds_get_matched_{what}_data"), library.dds_builtintopic_free_endpoint
    call.argtypes, call.restype = [ctypes.c_int32, ctypes.c_uint64], ctypes.POINTER(BuiltinEndpoint)
    free.argtypes, free.restype = [ctypes.POINTER(BuiltinEndpoint)], None
    found = call(entity._ref, handle)
    if not found:
        return None
    try:
        return MatchedEndpoint(UUID(bytes=bytes(found.contents.key)), _CQos.cqos_to_qos(found.contents.qos))
    finally:
        free(found)
