"""Policies of off-policy methods: a squashed Gaussian over chunks, a flow policy steered by a critic, and the
critics.

Actions here are the executed entries of a chunk in the env's -1..1 units, flat: D = E A. Axes: B batch, M
candidates, C context, E executed steps, Q critics of the ensemble (called heads here), O options of the
gripper.
"""

import copy
import itertools
import math

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm, softplus

from robo_rl.options import PolicyOptions
from robo_rl.policies.context import Context
from robo_rl.policies.nets import mlp
from robo_rl.policies.policy import ChainPolicy, Chunk, Obs, ObsSpec, PolicyBase
from robo_rl.sampling import Noise, randint, randn

LOG_STD = (-5.0, 1.0)  # of a squashed Gaussian, before the tanh
# temperature of supervised gripper options: what they are worth begins below what a taken one is found to be
GRASP = 0.05
ALL = slice(None)


class Ensemble(nn.Module):
    """Q_i(context, action), `heads` MLPs as batched products, layer norm after every hidden one (RLPD, arXiv
    2302.02948).

    `norm=False` leaves the layer norm out.
    """

    def __init__(self, context: int, action: int, hidden: int, layers: int, heads: int, norm: bool = True):
        super().__init__()
        self.heads, self.norm, self.context = heads, norm, context
        sizes = [context + action] + [hidden] * layers
        self.weights = nn.ParameterList(_uniform(heads, a, b) for a, b in itertools.pairwise(sizes))
        self.biases = nn.ParameterList(nn.Parameter(torch.zeros(heads, 1, b)) for b in sizes[1:])
        self.gains = nn.ParameterList(nn.Parameter(torch.ones(heads, 1, b)) for b in sizes[1:] if norm)
        self.shifts = nn.ParameterList(nn.Parameter(torch.zeros(heads, 1, b)) for b in sizes[1:] if norm)
        self.out, self.out_bias = _uniform(heads, hidden, 1), nn.Parameter(torch.zeros(heads, 1, 1))

    def _rest(self, h: Tensor, only: "Tensor | slice") -> Tensor:
        """First layer's product [Q,B,hidden] -> [Q,B]."""
        for i in range(len(self.weights)):
            if i:
                h = torch.baddbmm(self.biases[i][only], h, self.weights[i][only])
            if self.norm:
                h = torch.addcmul(self.shifts[i][only], layer_norm(h, h.shape[-1:]), self.gains[i][only])
            h = torch.relu(h)
        return torch.baddbmm(self.out_bias[only], h, self.out[only]).squeeze(-1)

    def forward(self, context: Tensor, action: Tensor, only: "Tensor | slice" = ALL) -> Tensor:
        """context [B,C], action [B,D] -> [Q,B]; `only` these heads."""
        w = self.weights[0][only]
        x = torch.cat([context, action], -1).expand(len(w), -1, -1)
        return self._rest(torch.baddbmm(self.biases[0][only], x, w), only)

    def many(self, context: Tensor, actions: Tensor, only: "Tensor | slice" = ALL) -> Tensor:
        """context [B,C], candidates [B,M,D] -> [Q,B,M], `only` these heads; the context's product is made
        once."""
        b, m, d = actions.shape
        w = self.weights[0][only]
        seen = torch.baddbmm(self.biases[0][only], context.expand(len(w), -1, -1), w[:, : self.context])
        h = actions.reshape(b * m, d).expand(len(w), -1, -1) @ w[:, self.context :]
        h = (h.view(len(w), b, m, -1) + seen[:, :, None]).view(len(w), b * m, -1)
        return self._rest(h, only).view(len(w), b, m)


def _uniform(heads: int, a: int, b: int) -> nn.Parameter:
    """`torch.nn.Linear`'s start, one matrix [a,b] per head."""
    bound = 1 / math.sqrt(a)
    return nn.Parameter(torch.empty(heads, a, b).uniform_(-bound, bound))


def squash(u: Tensor, mean: Tensor, log_std: Tensor) -> tuple[Tensor, Tensor]:
    """u ~ N(mean, std^2) -> tanh(u) and its log-density, summed over the last axis.

    log(1 - tanh(u)^2) = 2 (log 2 - u - softplus(-2u)) (Haarnoja et al. 2018, appendix C, in its stable form).
    """
    normal = -0.5 * ((u - mean) * torch.exp(-log_std)).square() - log_std - 0.5 * math.log(2 * math.pi)
    return torch.tanh(u), (normal - 2 * (math.log(2) - u - softplus(-2 * u))).sum(-1)


class SquashedHead(nn.Module):
    """x [B,I] -> mean and log std [B,D] of the Gaussian under the tanh."""

    def __init__(
        self,
        inputs: int,
        action: int,
        hidden: int,
        layers: int,
        init_std: float,
        act: str = "relu",
        residual: bool = False,
    ):
        super().__init__()
        self.net = mlp([inputs] + [hidden] * layers + [2 * action], act, residual)
        last = self.net[-1]
        assert isinstance(last, nn.Linear)
        nn.init.uniform_(last.weight, -1e-2 / math.sqrt(hidden), 1e-2 / math.sqrt(hidden))
        nn.init.zeros_(last.bias)
        with torch.no_grad():
            last.bias[action:] = math.log(init_std)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_std = self.net(x).chunk(2, -1)
        return mean, log_std.clamp(*LOG_STD)

    def sample(self, x: Tensor, generator: Noise) -> tuple[Tensor, Tensor]:
        """-> action in (-1, 1) [B,D], differentiable, and its log-density [B]."""
        mean, log_std = self(x)
        noise = randn(generator, len(mean), mean[0].numel()).to(mean.device).view_as(mean)
        u = mean + log_std.exp() * noise
        return squash(u, mean, log_std)


def gripper_options(execute: int) -> Tensor:
    """[O,E] with O = 2E: every command sequence in {-1,1} that changes at most once; option 2(k-1)+v holds
    the value v for k steps and the other one after that."""
    steps = torch.arange(execute)
    rows = [
        (1.0 if v else -1.0) * torch.where(steps < k, 1.0, -1.0)
        for k in range(1, execute + 1)
        for v in (0, 1)
    ]
    return torch.stack(rows)


def gripper_label(commands: Tensor) -> Tensor:
    """Option [B] of commands [B,E]: their signs up to the first change, which is taken to last."""
    closed = commands < 0
    changed = closed != closed[:, :1]
    e = commands.shape[1]
    first = torch.where(
        changed.any(1), changed.float().argmax(1), torch.full_like(changed[:, 0], e, dtype=torch.long)
    )
    return 2 * (first - 1) + (~closed[:, 0]).long()


class OwnUnits(PolicyBase):
    """A policy whose `act` decides in the env's units: its clean chunk is those actions, normalised."""

    def whole_chunk(self, x: Tensor, obs: Obs) -> Tensor:
        return self.action_norm.inverse(x)


class SquashedPolicy(OwnUnits):
    """tanh(N(mean, std^2)) over the executed entries of a chunk, as in SAC; std depends on the state.

    With `gripper "toggle"` a discrete critic of its own picks the gripper's commands among `gripper_options`
    (HIL-SERL's grasp critic, for chunks), and the Gaussian covers the other axes. With a `teacher` the actor
    as it was when `remember` was called proposes too, and the critics in `judge` choose (IBRL, Hu et al.
    2023, arXiv 2311.02198, eq. 3).
    """

    factors = 1
    sequences: Tensor  # where the gripper is toggled
    taught: Tensor  # with a teacher
    judge: "Ensemble | None"
    teacher: nn.ModuleList | None

    def __init__(self, options: PolicyOptions, spec: ObsSpec):
        super().__init__(options, spec)
        e, names = options.execute, spec.action_names
        self.gripper = names.index("gripper") if options.gripper == "toggle" and "gripper" in names else -1
        self.axes = [i for i in range(spec.action) if i != self.gripper]
        self.size = e * len(self.axes)
        self.actor = SquashedHead(
            self.context_size,
            self.size,
            options.hidden,
            options.layers,
            options.init_std,
            options.activation,
            options.residual,
        )
        if self.gripper >= 0:
            sizes = [self.context_size] + [options.hidden] * options.layers + [2 * e]
            self.grasp = mlp(sizes, options.activation, options.residual)
            self.register_buffer("sequences", gripper_options(e), persistent=False)
        self.judge = self.teacher = None
        if options.teacher:
            self.judge = Ensemble(
                self.context_size,
                e * spec.action,
                options.critic_hidden,
                options.critic_layers,
                options.critics,
            )
            self.judge.requires_grad_(False)
            self.register_buffer("taught", torch.zeros((), dtype=torch.bool))
            self.remember()
            self.taught.fill_(False)

    def remember(self) -> None:
        """The actor (and the gripper's critic) of now are the teacher from here on."""
        self.teacher = copy.deepcopy(
            nn.ModuleList([self.actor] + ([self.grasp] if self.gripper >= 0 else []))
        )
        self.teacher.requires_grad_(False)
        self.taught.fill_(True)

    @property
    def noise_scale(self) -> float:
        """Std of the Gaussian's start; the present one depends on the state."""
        return self.options.init_std

    def freeze_base(self) -> None:
        """Nothing is frozen."""

    def whole(self, moves: Tensor, grasp: Tensor | None) -> Tensor:
        """Entries of the Gaussian [B,size] and gripper commands [B,E] -> [B,E,A]."""
        b, e = len(moves), self.options.execute
        if grasp is None:
            return moves.view(b, e, -1)
        out = moves.new_empty(b, e, self.spec.action)
        out[..., self.axes] = moves.view(b, e, -1)
        out[..., self.gripper] = grasp
        return out

    def moves(self, actions: Tensor) -> Tensor:
        """Actions [B,E,A] -> the Gaussian's entries [B,size]."""
        return (actions if self.gripper < 0 else actions[..., self.axes]).flatten(1)

    def commands_of(self, moves: Tensor, context: Context, grasp: "nn.Module | None" = None) -> Tensor:
        """The Gaussian's entries [B,size] with the gripper as its critic (`grasp`: another one) has it ->
        [B,E,A]."""
        if self.gripper < 0:
            return self.whole(moves, None)
        return self.whole(moves, self.sequences[(grasp or self.grasp)(context.pooled).argmax(1)])

    def better(
        self, context: Context, own: Tensor, heads: "Tensor | slice" = ALL
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Own chunk [B,E,A] or the teacher's, by the least of the critics `heads` -> it, its value [B],
        whether it is own [B]."""
        assert self.teacher is not None and self.judge is not None
        old = self.commands_of(torch.tanh(self.teacher[0](context.pooled)[0]), context, self.teacher[-1])
        value = self.judge.many(context.pooled, torch.stack([own, old], 1).flatten(2), heads).min(0).values
        mine = value[:, 0] >= value[:, 1]
        return torch.where(mine[:, None, None], own, old), value.amax(1), mine

    @torch.no_grad()
    def act(self, obs: Obs, generator: Noise, explore: bool = True) -> Chunk:
        context = self.encode(obs)
        if explore:
            moves, logp = self.actor.sample(context.pooled, generator)
        else:
            moves, logp = torch.tanh(self.actor(context.pooled)[0]), context.pooled.new_empty(len(context), 0)
        actions = self.commands_of(moves, context)
        if self.teacher is not None and self.taught:
            actions, _, _ = self.better(context, actions)
        return Chunk(actions, self.action_norm(actions), logp[:, None] if explore else logp, {})

    def score(self, context: Context, trace: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        raise NotImplementedError("off-policy methods re-score nothing")

    def bc_loss(
        self, obs: Obs, chunk: Tensor, mask: Tensor, generator: torch.Generator, noises: int = 1
    ) -> Tensor:
        """Squared error of tanh(mean), and the cross-entropy of the gripper's option; no noise drawn, the std
        left to RL."""
        e, context = self.options.execute, self.encode(obs)
        chunk, mask = chunk[:, :e], mask[:, :e]
        moves = torch.tanh(self.actor(context.pooled)[0]).view(len(chunk), e, -1)
        err = (moves - (chunk if self.gripper < 0 else chunk[..., self.axes])).square().mean(-1) * mask
        loss = err.sum() / mask.sum().clamp(min=1)
        if self.gripper >= 0:
            loss = loss + 0.1 * nn.functional.cross_entropy(
                self.grasp(context.pooled) / GRASP, gripper_label(chunk[..., self.gripper])
            )
        return loss


class GuidedPolicy(OwnUnits, ChainPolicy):
    """A flow policy whose samples a critic chooses among: the acting policy of EXPO and PA-RL.

        a_1..a_N ~ flow;   EXPO: also a_i + edit_scale * tanh-Gaussian(s, a_i), clipped
        act = argmax_a min_i Q_i(s, a)
        PA-RL: the `keep` best of the N by mean Q climb dQ/da for `local_steps`, each keeps its best point

    `judge` is the (target) critic. Until `steered` is set it explores with any candidate and is evaluated as
    the plain flow. The flow itself is `head`. Exploring adds noise of `explore_std` to what acts.
    """

    steered: Tensor

    def __init__(self, options: PolicyOptions, spec: ObsSpec):
        super().__init__(options, spec)
        self.size = options.execute * spec.action
        self.judge = Ensemble(
            self.context_size, self.size, options.critic_hidden, options.critic_layers, options.critics
        )
        self.judge.requires_grad_(False)
        self.edit = (
            SquashedHead(
                self.context_size + self.size,
                self.size,
                options.critic_hidden,
                options.critic_layers,
                options.init_std,
            )
            if options.edit_scale
            else None
        )
        self.register_buffer("steered", torch.zeros((), dtype=torch.bool))

    def flow(self, context: Context, m: int, generator: Noise, head=None) -> Tensor:
        """`m` samples of the flow per row of the context: [B,m,D]."""
        return flow_samples(self, context, m, generator, head, self.options.spread)

    def edited(self, context: Context, actions: Tensor, generator: Noise) -> tuple[Tensor, Tensor]:
        """Edits of actions [B,m,D] -> edited actions, clipped, and the log-density of the edits [B,m]."""
        x = torch.cat([context.pooled[:, None].expand(-1, actions.shape[1], -1), actions], -1)
        assert self.edit is not None
        move, logp = self.edit.sample(x, generator)
        return (actions + self.options.edit_scale * move).clamp(-1, 1), logp

    @torch.no_grad()
    def proposals(self, context: Context, generator: Noise, head=None) -> Tensor:
        """Samples of the flow and their edits: [B,M,D]."""
        out = self.flow(context, self.options.candidates, generator, head)
        return out if self.edit is None else torch.cat([out, self.edited(context, out, generator)[0]], 1)

    def candidates(self, context: Context, generator: Noise, head=None) -> Tensor:
        """Everything the critic may choose from: [B,M,D]."""
        out = self.proposals(context, generator, head)
        if self.options.local_steps:
            out = climb(
                self.judge,
                context.pooled,
                out,
                self.options.keep,
                self.options.local_steps,
                self.options.local_rate,
            )
        return out

    def choose(
        self, context: Context, generator: Noise, head=None, heads: Tensor | None = None, greedy: bool = True
    ) -> tuple[Tensor, Tensor]:
        """-> the chosen actions [B,D] and their values [B]: least of the critics `heads` (None: the mean of
        all).

        Not `greedy`: a draw of softmax(value / softness)."""
        found = self.candidates(context, generator, head)
        with torch.no_grad():
            value = (
                self.judge.many(context.pooled, found).mean(0)
                if heads is None
                else self.judge.many(context.pooled, found, heads).min(0).values
            )
            if greedy:
                best = value.argmax(1)
            else:
                best = (value / self.options.softness + gumbel(value, generator)).argmax(1)
            rows = torch.arange(len(found), device=found.device)
            return found[rows, best], value[rows, best]

    @torch.no_grad()
    def act(self, obs: Obs, generator: Noise, explore: bool = True) -> Chunk:
        context = self.encode(obs)
        if not self.steered and explore:  # any of them: critics must have seen what they will choose among
            found = self.proposals(context, generator)
            drawn = randint(generator, found.shape[1], len(found)).to(found.device)
            actions = found[torch.arange(len(found), device=found.device), drawn]
        elif not self.steered:
            actions = self.flow(context, 1, generator)[:, 0]
        else:
            climbs = self.options.local_steps > 0
            heads = None if climbs else torch.arange(self.judge.heads, device=context.pooled.device)
            with torch.enable_grad():
                actions, _ = self.choose(context, generator, heads=heads, greedy=not (explore and climbs))
        if explore and (std := self.options.explore_std):
            noise = randn(generator, len(actions), self.size).to(actions.device)
            actions = (actions + std * noise).clamp(-1, 1)
        actions = actions.detach().view(len(context), self.options.execute, -1)
        return Chunk(actions, self.action_norm(actions), actions.new_empty(len(actions), 0), {})


def flow_samples(
    policy: ChainPolicy, context: Context, m: int, generator: Noise, head=None, spread: float = 1.0
) -> Tensor:
    """`m` samples of a flow policy per row of the context, by its plain chain -> actions [B,m,D], clipped to
    the box.

    `head` may stand in for the policy's own. With `spread` s < 1 the noise is s eps, and none for the first
    sample, which is then near the mean of the demonstrated chunks: few updates teach a flow that long before
    they teach it to sample."""
    b, d = len(context), policy.chunk
    x = randn(generator, b, m * d).to(policy.times.device)
    if spread < 1:
        x *= spread
        x[:, :d] = 0
    return flow_from(policy, context, x.view(b * m, d), m, head)


def flow_from(policy: ChainPolicy, context: Context, x: Tensor, m: int, head=None) -> Tensor:
    """Where the plain chain of a flow policy leads from the noise x [B*m,D], m of each row of the context ->
    actions [B,m,D], clipped to the box."""
    head = head or policy.head
    embedded = head.embed(context, m)
    for (a, b_out), time in zip(policy.plain, head.steps(policy.features), strict=True):
        x = a * x + b_out * head(embedded, x, time)
    return policy.commands(x).clamp(-1, 1).reshape(len(context), m, -1)


def gumbel(like: Tensor, generator: Noise) -> Tensor:
    """Standard Gumbel noise [B,M]: the argmax of x + noise is a draw from softmax(x)."""
    normal = randn(generator, like.shape[0], like.shape[1]).to(like.device)
    uniform = 0.5 * (1 + torch.erf(normal / math.sqrt(2)))
    return -torch.log(-torch.log(uniform.clamp(1e-6, 1 - 1e-6)))


def climb(judge: Ensemble, context: Tensor, actions: Tensor, keep: int, steps: int, rate: float) -> Tensor:
    """PA-RL's action optimisation: the `keep` of candidates [B,M,D] best by mean Q take `steps` of
    a <- clip(a + rate dQ/da), and each keeps its best iterate -> [B,keep,D]. No gradient reaches the
    critic."""
    with torch.no_grad():
        q = judge.many(context, actions).mean(0)
        top = q.topk(min(keep, actions.shape[1]), 1).indices
        x = actions.gather(1, top[..., None].expand(-1, -1, actions.shape[-1]))
        best, best_q = x.clone(), q.gather(1, top)
    for _ in range(steps):
        x = x.detach().requires_grad_(True)
        with torch.enable_grad():
            q = judge.many(context, x).mean(0)
            (slope,) = torch.autograd.grad(q.sum(), x)
        with torch.no_grad():
            better = q > best_q
            best, best_q = torch.where(better[..., None], x, best), torch.where(better, q, best_q)
            x = (x + rate * slope).clamp(-1, 1)
    if steps:
        with torch.no_grad():
            q = judge.many(context, x).mean(0)
            best = torch.where((q > best_q)[..., None], x, best)
    return best.detach()
