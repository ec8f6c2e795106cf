"""Compliant control of a torque-controlled arm and the safety around it. NumPy and MuJoCo, no torch: it runs
on the robot's own computer.

    law         target pose and measured joints -> joint torques, one tick at a time
    model       an arm's kinematics and dynamics from MJCF or URDF;  robot: limits, gains and topic names of
                presets
    schedule    time-stamped action chunks -> one row per control period
    governor    the last check before the wire: limits, watchdogs, e-stop;  trace: what it saw, hash-chained
    arm         a simulated arm under the law;  loop: 1 kHz in real time;  transport: how messages travel
    node        the simulated arm on a wire, with a CRISP robot's topics
    dds         the ROS 2 wire without ROS (robo_rl[robot])

Poses are those of the tool in the base frame [m], quaternions w first. Times are monotonic seconds given by
the caller.
"""
