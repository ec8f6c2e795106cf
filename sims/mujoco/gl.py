"""Which off-screen OpenGL works here: asked before mujoco is imported, which chooses its own then."""

import ctypes
import ctypes.util
import functools
import os
import sys

NO_GL = "rgb needs an off-screen OpenGL: apt-get install libegl1 libgl1-mesa-dri (or libosmesa6)"


def set_mujoco_gl() -> None:
    """Without a display, set MUJOCO_GL to what works here, unless it is set or mujoco is imported: an env of
    the user's that draws with `mujoco.Renderer` would be given GLFW, which ends the process."""
    seen = {"MUJOCO_GL", "DISPLAY", "WAYLAND_DISPLAY"} & os.environ.keys()
    if not seen and "mujoco" not in sys.modules and (works := gl_backend()):
        os.environ["MUJOCO_GL"] = works


@functools.cache
def gl_backend() -> "str | None":
    """ "egl" or "osmesa", whichever makes an off-screen context here; None without either or with
    MUJOCO_GL=off.

    MUJOCO_GL=egl or osmesa limits the choice. Asked with ctypes, not through PyOpenGL, which keeps the first
    library that it is given for the life of the process.
    """
    wanted = os.environ.get("MUJOCO_GL", "").lower().strip()
    if wanted in ("disable", "disabled", "off", "false", "0"):
        return None
    os.environ.setdefault("LP_NUM_THREADS", "0")  # llvmpipe's own threads; read when the driver starts
    probes = {"egl": _egl_works, "osmesa": _osmesa_works}
    for name in (wanted,) if wanted in probes else probes:
        if os.environ.get("PYOPENGL_PLATFORM", name).lower() == name and probes[name]():
            return name
    return None


def _egl_works() -> bool:
    """Whether some EGL device initialises and offers desktop OpenGL on an off-screen surface."""
    try:
        egl = ctypes.CDLL(ctypes.util.find_library("EGL") or "libEGL.so.1")
        egl.eglGetProcAddress.restype = ctypes.c_void_p
        query = egl.eglGetProcAddress(b"eglQueryDevicesEXT")
        display_of = egl.eglGetProcAddress(b"eglGetPlatformDisplayEXT")
    except (OSError, AttributeError):
        return False
    if not query or not display_of:
        return False
    pointer, count = ctypes.c_void_p, ctypes.c_int(0)
    query = ctypes.CFUNCTYPE(ctypes.c_uint, ctypes.c_int, pointer, ctypes.POINTER(ctypes.c_int))(query)
    display_of = ctypes.CFUNCTYPE(pointer, ctypes.c_uint, pointer, pointer)(display_of)
    devices = (ctypes.c_void_p * 32)()
    if not query(32, devices, ctypes.byref(count)):
        return False
    egl.eglInitialize.argtypes = [pointer, pointer, pointer]
    egl.eglChooseConfig.argtypes = [pointer, pointer, pointer, ctypes.c_int, pointer]
    surface_type, pbuffer, renderable, opengl, none = 0x3033, 0x0001, 0x3040, 0x0008, 0x3038
    attributes = (ctypes.c_int * 5)(surface_type, pbuffer, renderable, opengl, none)
    for device in devices[: count.value]:
        display = display_of(0x313F, device, None)  # EGL_PLATFORM_DEVICE_EXT
        # not terminated again: a display is shared by the whole process
        if display and egl.eglInitialize(display, None, None):
            config, found = ctypes.c_void_p(), ctypes.c_int(0)
            if (
                egl.eglChooseConfig(display, attributes, ctypes.byref(config), 1, ctypes.byref(found))
                and found.value
            ):
                return True
    return False


def _osmesa_works() -> bool:
    try:
        lib = ctypes.CDLL(ctypes.util.find_library("OSMesa") or "libOSMesa.so.8")
        create, destroy = lib.OSMesaCreateContextExt, lib.OSMesaDestroyContext
    except (OSError, AttributeError):
        return False
    create.restype, destroy.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    # GL_RGBA, depth bits, stencil bits, accumulation bits, no sharing
    context = create(0x1908, 24, 8, 0, None)
    if context:
        destroy(context)
    return bool(context)
