"""Losses on routes, as pure functions of router logits and chosen experts; they know no model and no schedule.

Shapes: `logits` [B, T, E], a router's own for B sequences of T positions; `ids` [B, T, k], the experts that were run;
`held` [B, T, E], experts that a cache holds as a token comes (`locality.held_before`). A loss is a scalar, the mean
over tokens; gradients flow into `logits` alone.
"""
