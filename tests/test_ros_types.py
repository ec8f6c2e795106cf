"""Types as rosidl has them: hashes are those that its generator wrote into public packages."""

import pytest

from controllers.action_types import ACTIONS
from controllers.services import MESSAGES, SERVICES, fields, filled
from controllers.transport import ROS_TYPES
from robo_rl.errors import UserError

FOLLOW, GRIP, MANAGER = (
    "control_msgs/action/FollowJointTrajectory",
    "control_msgs/action/GripperCommand",
    "controller_manager_msgs",
)
# read from *__description.c and *__struct.h that rosidl_generator_c made, in public repositories
GENERATED = {
    f"{FOLLOW}_Goal": "8a9060704b269608f5a340934cc26e66869dd14bdac29e2e7fd9ec8b9882d205",
    f"{FOLLOW}_Result": "8002e99ed2c14c6faa522f2a93c26d744c5982f254f9e98ff9c6f19789bdb220",
    f"{FOLLOW}_Feedback": "3fd0aaecf71725121ae1ff7f01098a5e0da581e672be18a6b2c286cb43d96b49",
    f"{FOLLOW}_SendGoal": "b13789dddc325a7a962825c45e28c77d37237ec129dd0c34dc5994562938c57f",
    f"{FOLLOW}_GetResult": "e3ceb38e3e1867c8dc0f46014df26e90eb93422f27e9e97f936e07f94be4bc8b",
    "action_msgs/srv/CancelGoal": "573d8b0a534451d7bc2ac8c5ffde8ac14b8593b7001175d0cd6516dcbeb8689a",
    "unique_identifier_msgs/msg/UUID": "1b8e8aca958cbea28fe6ef60bf6c19b683c97a9ef60bb34752067d0f2f7ab437",
    f"{MANAGER}/msg/HardwareInterface": "b4c556991db81ca56a49338b5e8f0675a6707faee54fba161d2bbd4d963d418a",
    f"{MANAGER}/msg/HardwareComponentState": "8723f76b60e3ea54920065e3e777d93c68b76fc12839ad6a6ca4e0a6439b384c",  # noqa: E501
    f"{MANAGER}/srv/ListHardwareComponents": "2ff105e609928671af16413362c0fdd089e1dd50c5a49d830db603ba8e4439c8",  # noqa: E501
    f"{MANAGER}/srv/SetHardwareComponentState": "940b15846ed3e1fb561ab45edf77a992b811fd59c574f45d5205a84a0deb2f65",  # noqa: E501
    f"{MANAGER}/srv/ListControllers": "4f8e36bb1fa5afdeba45c2d56ae6a2097b1493a253f961dd6290c085033bd189",
    "std_msgs/msg/Header": "f49fb3ae2cf070f793645ff749683ac6b06203e41c891e17701b1cb597ce6a01",
    "std_msgs/msg/String": "df668c740482bbd48fb39d76a70dfd4bd59db1288021743503259e948f6b1a18",
    "rosgraph_msgs/msg/Clock": "692f7a66e93a3c83e71765d033b60349ba68023a8c689a79e48078bcb5c58564",
    "geometry_msgs/msg/Vector3": "cc12fe83e4c02719f1ce8070bfd14aecd40f75a96696a67a2a1f37f7dbb0765d",
    "geometry_msgs/msg/PoseStamped": "10f3786d7d40fd2b54367835614bff85d4ad3b5dab62bf8bca0cc232d73b4cd8",
    "geometry_msgs/msg/TwistStamped": "5f0fcd4f81d5d06ad9b4c4c63e3ea51b82d6ae4d0558f1d475229b1121db6f64",
    "geometry_msgs/msg/WrenchStamped": "8dc3deaf06b2ab281f9f9a742a8961c328ca7cec16e3fd6586d3a5c83fa78f77",
    "sensor_msgs/msg/JointState": "a13ee3a330e346c9d87b5aa18d24e11690752bd33a0350f11c5882bc9179260e",
    "sensor_msgs/msg/CompressedImage": "15640771531571185e2efc8a100baf923961a4d15d5569652e6cb6691e8e371a",
    "trajectory_msgs/msg/JointTrajectory": "179b33eba59d676f6d967ac71fe35e7ca2f64b2f3928f4a018cec115e213796e",
    "diagnostic_msgs/msg/DiagnosticArray": "5a8a36efb05fb25070fa0fb3810290c0e6cd4862b54a8fb975a1ee8dc55a333e",
    "std_srvs/srv/SetBool": "abe9e4bb6b41b40e6789712c00ec8871923e089af3f667a79992a428cff2da0a",
    "builtin_interfaces/msg/Time": "b106235e25a4c5ed35098aa0a61a3ee9c9b18d197f398b0e4206cea9acf9c197",
    "lifecycle_msgs/msg/State": "dd2d02b82f3ebc858e53c431b1e6e91f3ffc71436fc81d0715214ac6ee2107a0",
    "service_msgs/msg/ServiceEventInfo": "41bcbbe07a75c9b52bc96bfd5c24d7f0fc0a08c0cb7921b3373c5732345a6f45",
}


def made_types():
    pytest.importorskip("rosbags", reason="needs robo_rl[robot]")
    pytest.importorskip("cyclonedds", reason="needs robo_rl[robot]")
    from controllers.dds_types import Types

    types = Types()
    for service in SERVICES:
        types.add_service(service)
    return types


def test_hashes_are_those_of_rosidls_generator():
    types = made_types()
    assert {name: types.hash(name).removeprefix("RIHS01_") for name in GENERATED} == GENERATED


def test_every_type_on_the_wire_has_a_hash_and_every_message_the_fields_of_the_store():
    """Where rosbags knows a message, ours has its fields in its order."""
    types = made_types()
    names = {*ROS_TYPES.values(), *MESSAGES, *SERVICES}
    # parts that say the same hash alike only under one name
    assert len({types.hash(n) for n in names}) >= len(names) - 4
    for name, text in MESSAGES.items():
        rows = [n for n, _ in types.store.fielddefs[name][1]]
        assert rows == [f for f, _, _ in fields(text)], name


def test_an_array_has_its_count_and_a_nested_action_type_keeps_its_name():
    assert fields("uint8[16] uuid\nfloat64[] x\nstring[<=2] y") == [
        ("uuid", "uint8", 16),
        ("x", "float64", -1),
        ("y", "string", -1),
    ]
    assert filled("uint8[16] uuid", {}) == {"uuid": [0] * 16}
    with pytest.raises(UserError, match="uuid has 16 values, got 3"):
        filled("uint8[16] uuid", {"uuid": [1, 2, 3]})
    assert fields(SERVICES[f"{FOLLOW}_SendGoal"][0])[1] == ("goal", f"{FOLLOW}_Goal", 0) and set(ACTIONS) == {
        FOLLOW,
        GRIP,
    }
