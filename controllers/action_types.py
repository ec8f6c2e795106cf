"""ROS 2's actions as plain data: what a goal, a result and feedback hold, and the services and messages that
carry them.

An action NAME of type pkg/action/Kind has the services NAME/_action/send_goal, cancel_goal and get_result and
the topics NAME/_action/feedback and status, as rcl_action names them. The fields are those of ROS 2 Jazzy's
interface packages.
"""

TRAJECTORY, GRIPPER = "control_msgs/action/FollowJointTrajectory", "control_msgs/action/GripperCommand"
CANCEL = "action_msgs/srv/CancelGoal"

_GRIPPED = "float64 position\nfloat64 effort\nbool stalled\nbool reached_goal"
ACTIONS = {  # type -> goal, result, feedback
    TRAJECTORY: (
        "trajectory_msgs/JointTrajectory trajectory\ntrajectory_msgs/MultiDOFJointTrajectory "
        "multi_dof_trajectory\ncontrol_msgs/JointTolerance[] "
        "path_tolerance\ncontrol_msgs/JointComponentTolerance[] "
        "component_path_tolerance\ncontrol_msgs/JointTolerance[] "
        "goal_tolerance\ncontrol_msgs/JointComponentTolerance[] "
        "component_goal_tolerance\nbuiltin_interfaces/Duration goal_time_tolerance",
        "int32 error_code\nstring error_string",
        "std_msgs/Header header\nstring[] joint_names\ntrajectory_msgs/JointTrajectoryPoint "
        "desired\ntrajectory_msgs/JointTrajectoryPoint actual\ntrajectory_msgs/JointTrajectoryPoint "
        "error\nstring[] multi_dof_joint_names\ntrajectory_msgs/MultiDOFJointTrajectoryPoint "
        "multi_dof_desired\ntrajectory_msgs/MultiDOFJointTrajectoryPoint "
        "multi_dof_actual\ntrajectory_msgs/MultiDOFJointTrajectoryPoint multi_dof_error",
    ),
    GRIPPER: ("control_msgs/GripperCommand command", _GRIPPED, _GRIPPED),
}

MESSAGES = {
    "builtin_interfaces/msg/Time": "int32 sec\nuint32 nanosec",
    "std_msgs/msg/Header": "builtin_interfaces/Time stamp\nstring frame_id",
    "geometry_msgs/msg/Vector3": "float64 x\nfloat64 y\nfloat64 z",
    "geometry_msgs/msg/Quaternion": "float64 x\nfloat64 y\nfloat64 z\nfloat64 w",
    "geometry_msgs/msg/Transform": "geometry_msgs/Vector3 translation\ngeometry_msgs/Quaternion rotation",
    "geometry_msgs/msg/Twist": "geometry_msgs/Vector3 linear\ngeometry_msgs/Vector3 angular",
    "trajectory_msgs/msg/JointTrajectoryPoint": (
        "float64[] positions\nfloat64[] velocities\nfloat64[] accelerations\nfloat64[] effort\n"
        "builtin_interfaces/Duration time_from_start"
    ),
    "trajectory_msgs/msg/JointTrajectory": (
        "std_msgs/Header header\nstring[] joint_names\ntrajectory_msgs/JointTrajectoryPoint[] points"
    ),
    "trajectory_msgs/msg/MultiDOFJointTrajectoryPoint": (
        "geometry_msgs/Transform[] transforms\ngeometry_msgs/Twist[] velocities\ngeometry_msgs/Twist[] "
        "accelerations\nbuiltin_interfaces/Duration time_from_start"
    ),
    "trajectory_msgs/msg/MultiDOFJointTrajectory": (
        "std_msgs/Header header\nstring[] joint_names\ntrajectory_msgs/MultiDOFJointTrajectoryPoint[] points"
    ),
    "unique_identifier_msgs/msg/UUID": "uint8[16] uuid",
    "action_msgs/msg/GoalInfo": "unique_identifier_msgs/UUID goal_id\nbuiltin_interfaces/Time stamp",
    "action_msgs/msg/GoalStatus": "action_msgs/GoalInfo goal_info\nint8 status",
    "action_msgs/msg/GoalStatusArray": "action_msgs/GoalStatus[] status_list",
    "control_msgs/msg/JointTolerance": "string name\nfloat64 position\nfloat64 velocity\nfloat64 "
    "acceleration",
    "control_msgs/msg/JointComponentTolerance": (
        "string joint_name\nuint16 component\nfloat64 position\nfloat64 velocity\nfloat64 acceleration"
    ),
    "control_msgs/msg/GripperCommand": "float64 position\nfloat64 max_effort",
    **{
        f"{kind}_{part}": text
        for kind, texts in ACTIONS.items()
        for part, text in zip(("Goal", "Result", "Feedback"), texts, strict=True)
    },
    **{
        f"{kind}_FeedbackMessage": f"unique_identifier_msgs/UUID goal_id\n{kind}_Feedback feedback"
        for kind in ACTIONS
    },
}

SERVICES = {  # type -> request, reply
    CANCEL: ("action_msgs/GoalInfo goal_info", "int8 return_code\naction_msgs/GoalInfo[] goals_canceling"),
    **{
        f"{kind}_SendGoal": (
            f"unique_identifier_msgs/UUID goal_id\n{kind}_Goal goal",
            "bool accepted\nbuiltin_interfaces/Time stamp",
        )
        for kind in ACTIONS
    },
    **{
        f"{kind}_GetResult": ("unique_identifier_msgs/UUID goal_id", f"int8 status\n{kind}_Result result")
        for kind in ACTIONS
    },
}
