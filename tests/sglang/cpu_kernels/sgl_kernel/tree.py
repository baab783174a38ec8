"""Draft trees: building them from scored candidates, verifying them greedily, addressing their KV
while drafting.

A tree of n nodes is node 0, the root (the last token emitted), and n - 1 drafts in breadth-first
order. Links are local node numbers, -1 for none: `next_token` the first child, `next_sibling` the
next child of the same parent. `retrive_index` holds the flat number over the batch, request * n +
node.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.errors import InvalidInput

FULL_MASK, QUERY_MASK = 0, 1


def build_draft_decode_metadata_cpu(
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    topk: int,
    num_steps: int,
    pool_len: int,
) -> Tensor:
    """A slot table [B * topk, width] of the draft branches: the request's own slots, then the
    branch's num_steps slots.

    Branch t's draft slots lie at positions seq_len + t * num_steps onwards of the request's row, at
    most pool_len.
    """
    batch, width = len(seq_lens), int(seq_lens.max()) + num_steps if len(seq_lens) else 0
    lens = seq_lens.long().repeat_interleave(topk).unsqueeze(1)
    branch = torch.arange(topk).repeat(batch).unsqueeze(1)
    columns = torch.arange(width).expand(batch * topk, -1)
    columns = columns + (columns >= lens) * branch * num_steps
    rows = req_pool_indices.long().repeat_interleave(topk).unsqueeze(1)
    return req_to_token[rows, columns.clamp(max=pool_len - 1)]


def build_tree_kernel_efficient_cpu(
    parent_list: Tensor,
    selected_index: Tensor,
    verified_seq_len: Tensor,
    tree_mask: Tensor,
    positions: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    topk: int,
    depth: int,
    draft_token_num: int,
    tree_mask_mode: int,
) -> None:
    """Writes mask, positions [B * n] and links [B, n] of each request's tree.

    selected_index [B, n - 1]: the chosen candidates, ascending; candidate c is child of
    parent_list[c // topk], a candidate number, or of the root when c // topk is 0. verified_seq_len
    [B] counts the tokens before the root.
    """
    if tree_mask_mode not in (FULL_MASK, QUERY_MASK):
        raise InvalidInput(
            "tree mask mode", seen=int(tree_mask_mode), allowed=[FULL_MASK, QUERY_MASK]
        )

    batch, nodes = len(verified_seq_len), draft_token_num
    parents = _parents(parent_list.view(batch, -1), selected_index, topk)
    seen = _ancestors(parents, depth)
    positions.copy_((verified_seq_len.unsqueeze(1) + seen.sum(2) - 1).flatten())
    retrive_index.copy_(torch.arange(batch * nodes).view(batch, nodes))
    link_nodes(parents, retrive_next_token, retrive_next_sibling)
    if tree_mask_mode == QUERY_MASK:
        tree_mask[: seen.numel()] = seen.flatten().to(tree_mask.dtype)
        return
    start = 0
    for request, length in enumerate(verified_seq_len.tolist()):
        block = tree_mask[start : start + nodes * (length + nodes)].view(nodes, length + nodes)
        block[:, length:] = seen[request].to(tree_mask.dtype)
        start += block.numel()


def link_nodes(parents: Tensor, next_token: Tensor, next_sibling: Tensor) -> None:
    """Writes first children and next siblings [B, n] of trees given by parents [B, n] (-1:
    none).
    """
    nodes = parents.shape[1]
    number = torch.arange(nodes)
    none = torch.tensor(nodes)
    child = parents.unsqueeze(1) == number.unsqueeze(1)  # [B, node, child]
    later = (parents.unsqueeze(1) == parents.unsqueeze(2)) & (number > number.unsqueeze(1))
    later &= (parents >= 0).unsqueeze(2)
    for links, target in ((child, next_token), (later, next_sibling)):
        first = torch.where(links, number, none).amin(2)
        target.copy_(torch.where(first < nodes, first, -1))


def verify_tree_greedy_cpu(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    target_predict: Tensor,
) -> None:
    """From the root, follows the child equal to the target's own choice as long as there is one.

    candidates and target_predict [B, n]; writes predicts [B * n] at accepted nodes (the target's
    choice after them), accept_index [B, longest path] (flat node numbers, the root first; the rest
    keeps its -1) and accept_token_num [B] (accepted drafts, without root and bonus).
    """
    longest = accept_index.shape[1]
    tokens, chosen, flat = candidates.tolist(), target_predict.tolist(), retrive_index.tolist()
    first_child, next_sibling = retrive_next_token.tolist(), retrive_next_sibling.tolist()
    for request in range(len(tokens)):
        path = [0]
        while len(path) < longest:
            child = first_child[request][path[-1]]
            while child != -1 and tokens[request][child] != chosen[request][path[-1]]:
                child = next_sibling[request][child]
            if child == -1:
                break
            path.append(child)
        accepted = torch.tensor([flat[request][node] for node in path])
        accept_index[request, : len(path)] = accepted.to(accept_index.dtype)
        predicts[accepted] = target_predict[request, torch.tensor(path)].to(predicts.dtype)
        accept_token_num[request] = len(path) - 1


def _parents(parent_list: Tensor, selected: Tensor, topk: int) -> Tensor:
    """Parents [B, n] as node numbers; -1 for the root and for a draft without a selected parent."""
    batch = len(selected)
    group = selected // topk
    padded = torch.cat([parent_list, parent_list.new_full((batch, 1), -1)], 1)
    candidate = padded.gather(1, torch.where(group > 0, group, 0))
    same = candidate.unsqueeze(2) == selected.unsqueeze(1)  # [B, draft, possible parent]
    found = (same * torch.arange(1, selected.shape[1] + 1)).sum(2)
    drafts = torch.where(group == 0, 0, torch.where(same.any(2), found, -1))
    return torch.cat([drafts.new_full((batch, 1), -1), drafts], 1)


def _ancestors(parents: Tensor, depth: int) -> Tensor:
    """[B, n, n]: whether column is row's node itself, one of its ancestors, or the root."""
    batch, nodes = parents.shape
    seen = torch.eye(nodes, dtype=torch.bool).repeat(batch, 1, 1)
    seen[:, :, 0] = True
    at = parents
    for _ in range(depth):
        seen.scatter_(2, at.clamp(min=0).unsqueeze(2), True)
        at = torch.where(at > 0, parents.gather(1, at.clamp(min=0)), 0)
    return seen
