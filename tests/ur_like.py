"""An arm with the joints of a UR5e: six, and none of the angles that a Panda has. Masses are about right; it
is held by its joints."""

JOINTS = (
    "shoulder_pan_joint",
    "shoulder_lift_joint",
    "elbow_joint",
    "wrist_1_joint",
    "wrist_2_joint",
    "wrist_3_joint",
)
LINKS = (
    ("0 0 0.163", "", "0 0 1", 3.7, JOINTS[0]),
    ("0 0.138 0", "1 0 1 0", "0 1 0", 8.4, JOINTS[1]),
    ("0 -0.131 0.425", "", "0 1 0", 2.3, JOINTS[2]),
    ("0 0 0.392", "1 0 1 0", "0 1 0", 1.2, JOINTS[3]),
    ("0 0.127 0", "", "0 0 1", 1.2, JOINTS[4]),
    ("0 0 0.1", "", "0 1 0", 0.2, JOINTS[5]),
)


def xml() -> str:
    text = '<site name="tool0" pos="0 0.1 0" quat="-1 1 0 0"/>'
    for pos, quat, axis, mass, joint in reversed(LINKS):
        turned = f' quat="{quat}"' if quat else ""
        text = (
            f'<body pos="{pos}"{turned}><joint name="{joint}" axis="{axis}" range="-6.28 6.28" '
            f'armature="0.1"/><inertial pos="0 0 0" mass="{mass}" diaginertia="0.02 0.02 0.02"/>{text}</body>'
        )
    return f'<mujoco><compiler angle="radian"/><worldbody>{text}</worldbody></mujoco>'
