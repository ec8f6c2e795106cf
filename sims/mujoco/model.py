"""The embedded arm: a Panda-like 7-joint robot of primitives, a table and each task's objects, as MJCF text.

Frames and limits follow the published Denavit-Hartenberg table of the Franka Emika Panda (Craig's
convention); geometry is our own capsules and boxes. Few geoms collide (finger pads, objects, table), as speed
is the product.
World: z up, the table top is z = 0, the robot's base is the origin and its workspace lies around x = 0.5 m.
"""

import math

DT = 0.005  # physics substep [s]
SUBSTEPS = 4  # substeps of one control step, period 20 ms
MOVE, TURN, JOINT = 0.02, 0.1, 0.05  # largest deltas of one control step [m], [rad], [rad]

# a_{i-1} [m], alpha_{i-1} in quarter turns, d_i [m] of joint i, then the tool centre point beyond joint 7.
DH = (
    (0.0, 0, 0.333),
    (0.0, -1, 0.0),
    (0.0, 1, 0.316),
    (0.0825, 1, 0.0),
    (-0.0825, -1, 0.384),
    (0.0, 1, 0.0),
    (0.088, 1, 0.0),
)
FLANGE = 0.107  # joint 7 to the hand [m]
TOOL = FLANGE + 0.1034  # joint 7 to the point between the finger tips [m]
HAND_YAW = -math.pi / 4  # the hand's turn about joint 7

JOINT_LOW = (-2.8973, -1.7628, -2.8973, -3.0718, -2.8973, -0.0175, -2.8973)  # [rad]
JOINT_HIGH = (2.8973, 1.7628, 2.8973, -0.0698, 2.8973, 3.7525, 2.8973)
JOINT_SPEED = (2.175, 2.175, 2.175, 2.175, 2.61, 2.61, 2.61)  # [rad/s]
JOINT_TORQUE = (87, 87, 87, 87, 12, 12, 12)  # [N m]
STIFFNESS = (3000, 3000, 2500, 2500, 800, 800, 500)  # [N m/rad]
DAMPING = (220, 220, 170, 170, 45, 45, 25)  # [N m s/rad]
FINGER_OPEN = 0.04  # travel of each finger [m]
FINGER_FORCE = 25.0  # [N]
HOME = (0.0, 0.0, 0.0, -2.37, 0.0, 2.37, math.pi / 4)  # hand points down, 0.22 m above (0.495, 0)

# mass [kg], centre of mass [m] and principal inertia [kg m^2] of each link in its joint frame.
LINKS = (
    (4.97, "0 0 -0.09", "0.035 0.035 0.012"),
    (0.65, "0 -0.09 0", "0.007 0.003 0.007"),
    (3.23, "0.03 0 -0.06", "0.022 0.022 0.012"),
    (3.59, "-0.045 0.08 0", "0.028 0.016 0.028"),
    (1.23, "0 0.02 -0.12", "0.018 0.016 0.005"),
    (1.67, "0.05 0 0", "0.003 0.005 0.005"),
    (1.47, "0 0 0.098", "0.006 0.006 0.003"),  # with the hand
)
FREE_OF_GRAVITY = (2, 3, 4, 5, 6)  # links whose weight is compensated; the others' moves nothing by 0.1 mm
# capsules drawn for each link: from, to [m], radius [m]
SHAPES = (
    (("0 0 -0.18", "0 0 0", 0.062),),
    (("0 0 0", "0 -0.18 0", 0.06),),
    (("0 0 -0.1", "0 0 0", 0.06), ("0 0 0", "0.0825 0 0", 0.055)),
    (("0 0 0", "-0.0825 0.08 0", 0.055),),
    (("0 0 -0.28", "0 0.03 -0.05", 0.048),),
    (("0 0 0", "0.088 0 0", 0.05),),
    (("0 0 0.02", "0 0 0.085", 0.042),),
)
QUARTER = {
    0: "1 0 0 0",
    1: "0.70710678118654757 0.70710678118654757 0 0",
    -1: "0.70710678118654757 -0.70710678118654757 0 0",
}

COLOURS = {
    "red": "0.85 0.12 0.1 1",
    "green": "0.1 0.65 0.2 1",
    "blue": "0.12 0.25 0.85 1",
    "yellow": "0.95 0.8 0.1 1",
    "wood": "0.72 0.52 0.3 1",
    "grey": "0.55 0.57 0.6 1",
}


def arm_xml() -> str:
    """The arm's nested bodies, base first."""
    white, dark = "0.92 0.92 0.9 1", "0.25 0.26 0.28 1"
    out = [f'<geom type="cylinder" size="0.08 0.07" pos="-0.02 0 0.07" rgba="{white}" class="drawn"/>']
    for i, (a, turn, d) in enumerate(DH):
        pos = (a, -d * turn, d if turn == 0 else 0.0)  # Rx(alpha) Tx(a) Tz(d)
        mass, com, inertia = LINKS[i]
        out.append(
            f'<body name="link{i + 1}" pos="{pos[0]} {pos[1]} {pos[2]}" quat="{QUARTER[turn]}"'
            f' gravcomp="{int(i in FREE_OF_GRAVITY)}"><inertial pos="{com}" mass="{mass}" '
            f'diaginertia="{inertia}"/>'
            f'<joint name="joint{i + 1}" axis="0 0 1" range="{JOINT_LOW[i]} {JOINT_HIGH[i]}" armature="0.1" '
            f'damping="1"/>'
        )
        for start, end, radius in SHAPES[i]:
            out.append(
                f'<geom type="capsule" fromto="{start} {end}" size="{radius}" '
                f'rgba="{white if i % 2 == 0 else dark}" class="drawn"/>'
            )
    half = HAND_YAW / 2
    out.append(f"""
<frame pos="0 0 {FLANGE}" quat="{math.cos(half)} 0 0 {math.sin(half)}">
  <geom type="box" size="0.02 0.1 0.028" pos="0 0 0.03" rgba="{white}" class="drawn"/>
  <camera name="wrist" pos="0.075 0 0.02" xyaxes="0 1 0 0.94 0 0.34" fovy="75"/>
  <body name="left_finger" pos="0 0 0.0584">
    <inertial pos="0 0.007 0.027" mass="0.03" diaginertia="1e-5 1e-5 3e-6"/>
    <joint name="left_finger" type="slide" axis="0 1 0" range="-0.001 {FINGER_OPEN + 0.002}" armature="0.1" damping="5"/>
    <geom name="left_pad" type="box" size="0.011 0.007 0.027" pos="0 0.007 0.0265" rgba="{dark}" class="pad"/>
  </body>
  <body name="right_finger" pos="0 0 0.0584">
    <inertial pos="0 -0.007 0.027" mass="0.03" diaginertia="1e-5 1e-5 3e-6"/>
    <joint name="right_finger" type="slide" axis="0 -1 0" range="-0.001 {FINGER_OPEN + 0.002}" armature="0.1" damping="5"/>
    <geom name="right_pad" type="box" size="0.011 0.007 0.027" pos="0 -0.007 0.0265" rgba="{dark}" class="pad"/>
  </body>
</frame>""")  # noqa: E501
    out.append("</body>" * len(DH))
    return "".join(out)


def block_xml(name: str, half: tuple[float, float, float], colour: str, mass: float) -> str:
    """A free box with half sizes [m]."""
    return (
        f'<body name="{name}" pos="0.5 0 {half[2]}"><freejoint name="{name}"/>'
        f'<geom name="{name}" type="box" size="{half[0]} {half[1]} {half[2]}" mass="{mass}" '
        f'rgba="{COLOURS[colour]}" class="solid"/></body>'
    )


GOAL = "goal"  # the body that is a task's mark


def goal_xml(shape: str, size: str) -> str:
    """A mark without substance: where the task wants something (mocap body `goal`)."""
    return (
        f'<body name="{GOAL}" mocap="true" pos="0.5 0 0.2"><geom type="{shape}" size="{size}" '
        f'rgba="0.1 0.8 0.3 0.5" class="drawn"/></body>'
    )


def look(eye: tuple[float, float, float], at: tuple[float, float, float]) -> str:
    """Attributes of an upright camera at `eye` that looks towards `at` [m]."""
    bx, by, bz = (e - a for e, a in zip(eye, at, strict=True))  # camera z points backwards
    flat = math.hypot(bx, by)
    x = (-by / flat, bx / flat, 0.0)
    y = (-bz * bx / flat, -bz * by / flat, flat)
    return f'pos="{eye[0]} {eye[1]} {eye[2]}" xyaxes="{" ".join(f"{v:.6f}" for v in (*x, *y))}"'


def scene_xml(objects: str, assets: str = "") -> str:
    """The whole model: arm, table, lights, cameras and the task's `objects` with what they need in
    <asset>."""
    actuators = [
        f'<position name="joint{i + 1}" joint="joint{i + 1}" kp="{STIFFNESS[i]}" kv="{DAMPING[i]}" '
        f'forcerange="{-JOINT_TORQUE[i]} {JOINT_TORQUE[i]}"/>'
        for i in range(7)
    ]
    actuators += [
        f'<position name="{side}" joint="{side}_finger" kp="1500" kv="25" '
        f'forcerange="{-FINGER_FORCE} {FINGER_FORCE}"/>'
        for side in ("left", "right")
    ]
    return f"""
<mujoco model="robo_rl arm">
  <compiler angle="radian" autolimits="true"/>
  <option timestep="{DT}" integrator="implicitfast" cone="pyramidal" iterations="50" ls_iterations="30"/>
  <asset><texture type="skybox" builtin="gradient" rgb1="0.93 0.95 0.97" rgb2="0.62 0.68 0.75" width="64" height="384"/></asset>
  <visual>
    <global offwidth="1024" offheight="1024" fovy="45"/>
    <quality shadowsize="0" offsamples="0"/>
    <headlight ambient="0.35 0.35 0.35" diffuse="0.4 0.4 0.4" specular="0 0 0"/>
    <map znear="0.005" zfar="10"/>
  </visual>
  <default>
    <default class="drawn"><geom contype="0" conaffinity="0" mass="0" group="2"/></default>
    <default class="solid"><geom contype="1" conaffinity="1" friction="1 0.005 0.0001" condim="3"/></default>
    <default class="pad"><geom contype="2" conaffinity="1" friction="1.2 0.01 0.0001" condim="4"
                               priority="1" solref="0.01 1" solimp="0.97 0.99 0.001"/></default>
  </default>
  {f"<asset>{assets}</asset>" if assets else ""}
  <worldbody>
    <light pos="0.3 -0.8 2" dir="0.1 0.4 -1" directional="true" castshadow="false" diffuse="0.55 0.55 0.55"/>
    <camera name="front" {look((1.08, -0.36, 0.62), (0.49, 0.0, 0.08))} fovy="40"/>
    <geom name="table" type="plane" size="0.75 0.6 0.05" pos="0.4 0 0" rgba="0.42 0.44 0.48 1" class="solid"
          condim="3"/>
    {arm_xml()}
    {objects}
  </worldbody>
  <actuator>{"".join(actuators)}</actuator>
</mujoco>"""  # noqa: E501
