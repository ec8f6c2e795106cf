"""Learned simulators: what a model predicts (`model`), how it is learnt (`latent`, `video`), and the model as
an env (`env`).

Like the simulators, a model is a vector env under the contract of `sims.check`, so every method trains in it
unchanged.
It says how far it can be trusted: a calibrated horizon, and an uncertainty beyond which an episode is cut
(truncated, never terminated).
"""
