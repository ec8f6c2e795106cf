"""The control law once more, in plain NumPy from the equations in its docstring: what the compiled one is
held against."""

import math

import numpy as np

from robo_rl import geometry as g


class PlainLaw:
    """Takes the commands of `controllers.law.Law`; slow, and without a check of what it is given."""

    def __init__(self, options, robot):
        self.o, self.robot = options, robot
        n = len(robot.joints)
        self.kn = np.broadcast_to(np.asarray(options.posture_stiffness, float), n)
        given = options.posture_damping
        self.dn = 2 * np.sqrt(self.kn) if given is None else np.broadcast_to(np.asarray(given, float), n)
        self.rate = (
            robot.torque_rate if options.torque_rate is None else min(options.torque_rate, robot.torque_rate)
        )
        self.most = options.torque_fraction * np.array(robot.torque)
        self.home = np.array(options.stiffness)

    def activate(self, model):
        self.pos = self.limited_pos = self.target_pos = np.array(model.pos)
        self.quat = self.limited_quat = self.target_quat = np.array(model.quat)
        self.velocity, self.acceleration = np.zeros(6), np.zeros(6)
        self.q_ref = self.q_target = np.array(model.q)
        self.dq_ref, self.k, self.masses = np.zeros(model.n), np.zeros(6), np.ones(6)
        self.tau = np.clip(model.bias, -self.most, self.most)
        self.k_target, self.pace = self.home, self.home
        self.gain, self.mass_age = 0.0 if self.o.ramp else 1.0, math.inf
        self.feed_age = self.dq_age = self.k_age = math.inf
        self.lag, self.residual, self.carry, self.fade = self.o.filter_time, np.zeros(model.n), False, 0.0

    def set_target(self, pos, quat):
        self.target_pos, self.target_quat = np.array(pos), np.array(quat) / np.linalg.norm(quat)

    def rebase(self, model):
        self.pos = self.limited_pos = self.target_pos = np.array(model.pos)
        self.quat = self.limited_quat = self.target_quat = np.array(model.quat)
        self.velocity, self.acceleration = model.jac @ model.dq, np.zeros(6)
        self.lag, self.carry = 0.0, True

    def stand(self):
        self.gain, self.k = 1.0, self.k_target.copy()
        self.carry, self.fade = False, 0.0

    def set_joints(self, q, dq):
        self.q_target = np.clip(q, self.robot.lower, self.robot.upper)
        self.dq_ref, self.dq_age = np.clip(dq, -np.array(self.robot.velocity), self.robot.velocity), 0.0

    def set_wrench(self, wrench, frame):
        self.feed, self.feed_frame, self.feed_age = np.array(wrench), frame, 0.0

    def set_stiffness(self, k):
        self.k_target = np.minimum(k, np.repeat(self.o.most_stiffness, 3))
        self.pace, self.k_age = np.maximum(np.maximum(self.home, self.k_target), self.k), 0.0

    def follow(self, dt):
        """The reference goes on: limited in speed, then filtered, on the geodesic."""
        keep = math.exp(-dt / self.lag) if self.lag else 0.0
        way = self.target_pos - self.limited_pos
        self.limited_pos = self.limited_pos + way * min(
            1.0, self.o.target_speed * dt / max(np.linalg.norm(way), 1e-300)
        )
        turn = g.log(g.multiply(self.target_quat, g.conjugate(self.limited_quat)))
        part = min(1.0, self.o.target_turn * dt / max(np.linalg.norm(turn), 1e-300))
        self.limited_quat = g.multiply(g.exp(part * turn), self.limited_quat)
        error = g.pose_error(self.limited_pos, self.limited_quat, self.pos, self.quat)
        step = (1 - keep) * error
        self.pos, self.quat = self.pos + step[:3], g.multiply(g.exp(step[3:]), self.quat)
        self.acceleration = (step / dt - self.velocity) / dt
        self.velocity = step / dt
        if np.linalg.norm(error) < 1e-10 and np.linalg.norm(self.velocity[:3]) * dt < 1e-10:
            # arrived: what is left of the motion is dropped
            self.velocity, self.acceleration = np.zeros(6), np.zeros(6)

    def age(self, dt):
        """Commands expire, stiffness and posture gain ramp."""
        self.feed_age, self.dq_age, self.k_age = self.feed_age + dt, self.dq_age + dt, self.k_age + dt
        if self.dq_age > self.o.command_timeout:
            self.dq_ref = np.zeros_like(self.dq_ref)
        if self.o.command_timeout < self.k_age < math.inf:
            self.k_age, self.k_target, self.pace = math.inf, self.home, np.maximum(self.home, self.k)
        self.lag = min(self.o.filter_time, self.lag + 0.1 * dt)
        self.fade = 1.0 if self.carry else max(self.fade - dt / 0.06, 0.0)
        part = dt / self.o.ramp if self.o.ramp else math.inf
        self.gain = min(1.0, self.gain + part)
        with np.errstate(invalid="ignore"):
            most = np.where(self.pace > 0, self.pace * part, 0.0)
        self.k = self.k + np.clip(self.k_target - self.k, -most, most)
        most = self.o.posture_speed * dt
        self.q_ref = self.q_ref + np.clip(self.q_target - self.q_ref, -most, most)

    def tick(self, model, dt):
        o, jac, n = self.o, model.jac, model.n
        self.age(dt)
        self.follow(dt)
        turn = np.kron(np.eye(2), g.matrix(np.array(model.quat)))
        axes = turn if o.frame == "tool" else np.eye(6)
        a, eye = jac @ model.minv_jt.T, np.eye(6)
        self.mass_age += dt
        if self.mass_age >= 0.02 and o.damping is None and o.task == "impedance" and self.k.any():
            own = axes.T @ a @ axes
            self.masses = np.minimum(np.diag(np.linalg.inv(own + o.regularisation * eye)), 4 / np.diag(own))
            self.mass_age = 0.0
        if o.damping is not None:
            d = np.array(o.damping)
        else:
            d = (
                2
                * o.damping_ratio
                * np.sqrt(self.k if o.task == "operational_space" else self.k * self.masses)
            )
        error = axes.T @ g.pose_error(self.pos, self.quat, np.array(model.pos), np.array(model.quat))
        slip = axes.T @ (self.velocity - jac @ model.dq)
        if o.error_clip is not None:
            error = np.clip(error, -np.array(o.error_clip), o.error_clip)
        f = axes @ (self.k * error + d * slip)
        if self.feed_age <= o.command_timeout:
            f = f + (turn if self.feed_frame == "tool" else eye) @ self.feed
        t0 = self.gain * self.kn * (self.q_ref - model.q) + self.dn * (self.dq_ref - model.dq)
        if o.posture_torque is not None:
            t0 = np.clip(t0, -o.posture_torque, o.posture_torque)
        most = np.repeat(o.feed_acceleration, 3)
        if any(o.stiffness) or o.nullspace == "dynamic":
            w = np.linalg.inv(a + o.regularisation * eye)
            if o.task == "operational_space":
                arm = np.diag([1.0] * 3 + [0.2] * 3)
                size, axes_of = np.linalg.eigh(arm @ (a + o.regularisation * eye) @ arm)
                w = (
                    arm
                    @ axes_of
                    @ np.diag(1 / np.maximum(size, max(1 / o.mass_limit, self.k.max() / 20_000)))
                    @ axes_of.T
                    @ arm
                )
            ad = np.clip(self.acceleration, -most, most)
            f = f + w @ ad if o.task == "impedance" else w @ (f + ad)
            if o.nullspace == "dynamic":
                left = o.regularisation * w if o.task == "impedance" else 0.0 * eye
                f = f - w @ (eye + left + left @ left) @ model.minv_jt @ t0
        if o.nullspace == "kinematic":
            f = f - np.linalg.inv(jac @ jac.T + 1e-6 * eye) @ jac @ t0
        t = jac.T @ f + t0 + model.bias
        low, high, margin = np.array(self.robot.lower), np.array(self.robot.upper), o.limit_margin
        brake = 2 * math.sqrt(o.limit_torque / margin)
        for side, inside in ((-1, model.q - low), (1, high - model.q)):
            depth = np.clip(1 - inside / margin, 0, 1)
            t = t - side * depth * (
                np.maximum(side * (jac.T @ f), 0) + brake * np.maximum(side * model.dq, 0)
            )
        t = t + o.limit_torque * (
            np.clip((low + margin - model.q) / margin, 0, 1)
            - np.clip((model.q - high + margin) / margin, 0, 1)
        )
        if o.friction:
            p1, p2, p3 = (np.array(self.robot.friction[f"phi{i}"]) for i in (1, 2, 3))
            t = t + p1 / (1 + np.exp(-p2 * (model.dq + p3))) - p1 / (1 + np.exp(-p2 * p3))
        if self.carry:
            self.residual, self.carry = self.tau - t, False
        t = t + self.residual * self.fade**2 * (3 - 2 * self.fade)
        t = np.clip(t, self.tau - self.rate * dt, self.tau + self.rate * dt)
        self.tau = np.clip(t, -self.most, self.most)
        assert len(self.tau) == n
        return self.tau
