"""Tree links from an ancestor mask, as the NGRAM drafter gives them."""

from __future__ import annotations

import torch
from torch import Tensor

from .tree import link_nodes


def reconstruct_indices_from_tree_mask(
    tree_mask: Tensor,
    verified_seq_len: Tensor,
    positions: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    batch_size: int,
    draft_token_num: int,
) -> None:
    """Writes positions [B * n] and links [B, n]; tree_mask is flat [B, n, n], true where column is
    row's ancestor.

    A node's parent is its latest ancestor; a node without any is a root of its own and has no
    sibling.
    """
    nodes = draft_token_num
    mask = tree_mask[: batch_size * nodes * nodes].view(batch_size, nodes, nodes).bool()
    number = torch.arange(nodes)
    ancestors = mask & (number < number.unsqueeze(1))
    parents = torch.where(ancestors, number, -1).amax(2)
    positions.copy_((verified_seq_len.unsqueeze(1) + ancestors.sum(2)).flatten())
    retrive_index.copy_(torch.arange(batch_size * nodes).view(batch_size, nodes))
    link_nodes(parents, retrive_next_token, retrive_next_sibling)
