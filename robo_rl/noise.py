"""Noise that follows from a key: integers are mixed to 63 bits, and a generator takes its whole state from
them.

`torch.Generator.manual_seed` on the CPU seeds a Mersenne Twister with the low 32 bits of its argument: of
65,000 keys two share their noise with a probability of 0.4. `seed_noise` keeps every bit.
"""

import numpy as np
import torch

# of the Mersenne Twister, as torch 1 and 2 lay it out
STATE = torch.Generator().manual_seed(0).get_state().numpy()
FIRST, LAST = 24, 24 + 8 * 624  # bytes of its words, each in 8
GAMMA, A, B = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # SplitMix64
STEPS = np.arange(1, 313, dtype=np.uint64) * np.uint64(GAMMA)
assert STATE.shape == (5056,) and STATE[FIRST : FIRST + 16].view(np.uint64).tolist() == [0, 1], (
    "another torch"
)


def mix(*keys: int) -> int:
    """63 random bits that depend on the integers `keys` alone (SplitMix64, Steele et al. 2014)."""
    h = 0
    for key in keys:
        z = (h + key + GAMMA) & 0xFFFFFFFFFFFFFFFF
        z = ((z ^ z >> 30) * A) & 0xFFFFFFFFFFFFFFFF
        z = ((z ^ z >> 27) * B) & 0xFFFFFFFFFFFFFFFF
        h = z ^ z >> 31
    return h >> 1


def seed_noise(generator: torch.Generator, key: int) -> torch.Generator:
    """Make what `generator` draws next depend on all bits of `key`, an integer of up to 64 bits -> the
    generator.

    On the CPU its 624 words become the next 312 outputs of SplitMix64 from `key`; elsewhere torch's seed has
    64 bits itself.
    """
    if generator.device.type != "cpu":
        return generator.manual_seed(key)
    z = STEPS + np.uint64(key)
    z ^= z >> np.uint64(30)
    z *= np.uint64(A)
    z ^= z >> np.uint64(27)
    z *= np.uint64(B)
    z ^= z >> np.uint64(31)
    state = STATE.copy()
    state[:8].view(np.uint64)[0] = key
    state[FIRST:LAST].view(np.uint64)[:] = z.view(np.uint32)
    return generator.set_state(torch.from_numpy(state))
