"""A step's update by plain Transformers on rows padded at the right, on one process: the independent reference.

Nothing of the program's own code is used but the completions and the config's fields. B completions, S positions,
T = S - 1 targets, of which `trained_BT` are real.
"""

import copy
from types import SimpleNamespace

import torch
from transformers import AutoModelForCausalLM

CAP = 20.0
TIE = 1e-4  # entropies so near to the quantile are one with it


class Rows:
    """The completions of a rollout as padded rows."""

    def __init__(self, completions, dtype):
        self.completions = completions
        rows = [c.prompt_ids + c.token_ids for c in completions]
        width = max(map(len, rows))
        self.ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
        self.mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
        self.trained_BT = torch.tensor([[c.is_trained and len(c.prompt_ids) <= place < c.num_tokens
                                         for place in range(1, width)] for c in completions])
        sampler = [[0.0] * (len(c.prompt_ids) - 1) + c.sampler_logprobs + [0.0] * (width - c.num_tokens)
                   for c in completions]
        self.sampler_BT = torch.tensor(sampler, dtype=dtype)
        self.rewards = torch.tensor([c.reward for c in completions], dtype=dtype)
        self.groups = torch.tensor([c.group for c in completions])

    def score(self, model, temperature):
        """Log-probs of the targets and entropies, both B x T."""
        logits = model(input_ids=self.ids, attention_mask=self.mask).logits[:, :-1] / temperature
        logprobs = torch.log_softmax(logits, -1)
        entropy = -(logprobs.exp() * logprobs).sum(-1)
        return logprobs.gather(-1, self.ids[:, 1:, None])[..., 0], entropy

    def parts(self, count):
        """Masks over the completions, one a mini-batch: whole groups in order."""
        groups = list(dict.fromkeys(self.groups.tolist()))
        places = torch.tensor([groups.index(g) * count // len(groups) for g in self.groups.tolist()])
        return [places == part for part in range(count)]


def advantages_of(rewards, groups, config):
    """One a completion."""
    found = torch.zeros_like(rewards)
    for group in set(groups.tolist()):
        members = groups == group
        values, n = rewards[members], int(members.sum())
        if config.baseline == "leave_one_out":
            centred = values - (values.sum() - values) / (n - 1)
        else:
            centred = values - values.mean()
        if config.scale_rewards == "group":
            centred = centred / (values.std() + 1e-4)
        found[members] = centred
    if config.scale_rewards == "batch":
        found = found / (rewards.std() + 1e-4)
    if config.scale_rewards == "whiten":
        found = (found - found.mean()) / (found.std() + 1e-4)
    return found


def kl_of(logprobs, ref, estimator):
    d = (logprobs - ref).clamp(-CAP, CAP)
    return {"k1": d, "k2": d * d / 2, "k3": (-d).exp() - 1 + d}[estimator]


def row_sum(values, trained):
    """Of each row's trained tokens, B x 1."""
    return torch.where(trained, values, 0.0).sum(1, keepdim=True)


def token_losses(config, new, ratio, advantages):
    low, high = config.epsilon, config.epsilon if config.epsilon_high is None else config.epsilon_high
    if config.loss_type == "cispo":
        return -ratio.detach().clamp(max=high) * advantages * new
    if config.loss_type == "sapo":
        t = torch.where(advantages > 0, config.sapo_temperature_pos, config.sapo_temperature_neg)
        return -4 / t * torch.sigmoid(t * (ratio - 1)) * advantages
    unclipped = ratio if config.delta is None else ratio.clamp(max=config.delta)
    objective = torch.min(unclipped * advantages, ratio.clamp(1 - low, 1 + high) * advantages)
    if config.dual_clip is not None:
        objective = torch.where(advantages < 0, torch.max(objective, config.dual_clip * advantages), objective)
    return -objective


def sampler_weights(config, old, sampler, trained):
    difference = old - sampler
    level, how = config.importance_sampling_mode.split("_")
    if level == "sequence":
        difference = row_sum(difference, trained).expand_as(difference)
    weights = difference.clamp(-CAP, CAP).exp()
    low = config.importance_sampling_clip_min or 0.0
    high = float("inf") if config.importance_sampling_clip_max is None else config.importance_sampling_clip_max
    return weights.clamp(low, high) if how == "truncate" else weights * ((weights >= low) & (weights <= high))


def clip_metrics(config, ratio, advantages):
    low, high = config.epsilon, config.epsilon if config.epsilon_high is None else config.epsilon_high
    too_high, too_low = (ratio > 1 + high) & (advantages > 0), (ratio < 1 - low) & (advantages < 0)
    if config.loss_type == "cispo":
        return {"cispo_clip_ratio": (ratio > high) & (advantages > 0)}
    if config.loss_type == "sapo":
        return {}
    return {"clip_ratio/low_mean": too_low, "clip_ratio/high_mean": too_high,
            "clip_ratio/region_mean": too_low | too_high}


def one_update(config, max_length, rows, now, trained, threshold):
    """(loss, metrics' values B x T) of the trained tokens of one optimizer step.

    now: new, old, sampler and ref log-probs, entropy and old_entropy, advantages; all B x T.
    """
    lengths = trained.sum(1, keepdim=True).clamp(min=1).to(now.new)
    num_tokens, num_sequences = trained.sum(), trained.any(1).sum()
    log_ratio = now.new - now.old
    if config.importance_sampling_level != "token":
        mean = row_sum(log_ratio, trained) / lengths
        if config.importance_sampling_level == "sequence_token":
            mean = mean.detach() + now.new - now.new.detach()
        log_ratio = mean.expand_as(now.new)
    ratio = log_ratio.clamp(-CAP, CAP).exp()
    weight = {"dapo": 1 / num_tokens, "cispo": 1 / num_tokens, "grpo": 1 / (num_sequences * lengths),
              "sapo": 1 / (num_sequences * lengths), "dr_grpo": 1 / (num_sequences * max_length)}[config.loss_type]
    loss_BT = token_losses(config, now.new, ratio, now.advantages)
    weights_BT = sampler_weights(config, now.old, now.sampler, trained)
    if config.importance_sampling_correction:
        loss_BT = loss_BT * weights_BT
    loss_BT = loss_BT * weight - config.entropy_coef * now.entropy / num_tokens
    counted = trained if threshold is None else trained & (now.old_entropy >= threshold)
    loss = torch.where(counted, loss_BT, 0.0).sum()
    gap = now.old - now.sampler
    metrics = {"entropy": now.entropy, "ratio": ratio, "sampling/sampling_logp_difference/mean": gap.abs(),
               "sampling/importance_sampling_ratio/mean": gap.exp(), "sampling/kl": gap.exp() - 1 - gap}
    metrics |= clip_metrics(config, ratio, now.advantages)
    if config.importance_sampling_correction:
        metrics |= {"sampling/importance_sampling_weight/mean": weights_BT, "sampling/masked_fraction": weights_BT == 0}
    if config.beta:
        metrics["kl"] = kl_of(now.new, now.ref, config.kl_estimator)
        if config.kl_in == "loss":
            kl_BT = metrics["kl"] * (ratio if config.use_bias_correction_kl else 1.0)
            loss = loss + config.beta * torch.where(trained, kl_BT * weight, 0.0).sum()
    return loss, {name: value.detach().to(now.new)[trained] for name, value in metrics.items()}


def learn(model, frozen, completions, config, dtype):
    """One rollout's updates on `model`, SGD in place; its metrics."""
    rows, temperature = Rows(completions, dtype), config.rollout.temperature
    with torch.no_grad():
        old, old_entropy = rows.score(model, temperature)
        ref, _ = rows.score(frozen, temperature)
    rewards, loss_config = rows.rewards, config.loss
    if loss_config.beta and loss_config.kl_in == "reward":
        rewards = rewards - loss_config.beta * row_sum(kl_of(old, ref, loss_config.kl_estimator), rows.trained_BT)[:, 0]
    advantages_BT = advantages_of(rewards, rows.groups, config.advantages)[:, None].expand_as(old)
    share = loss_config.top_entropy_quantile
    threshold = None if share == 1 else torch.quantile(old_entropy[rows.trained_BT], 1 - share) - TIE
    losses, norms, values = [], [], {}
    for part in rows.parts(config.batch.num_minibatches) * loss_config.num_iterations:
        trained = rows.trained_BT & part[:, None]
        if not trained.any():
            continue
        new, entropy = rows.score(model, temperature)
        now = SimpleNamespace(new=new, old=old, sampler=rows.sampler_BT, ref=ref, entropy=entropy,
                              old_entropy=old_entropy, advantages=advantages_BT)
        loss, metrics = one_update(loss_config, config.rollout.max_completion_length, rows, now, trained, threshold)
        model.zero_grad()
        loss.backward()
        norms.append(torch.stack([p.grad.double().norm() for p in model.parameters()]).norm().item())
        scale = config.policy.learning_rate * min(1.0, config.policy.max_grad_norm / max(norms[-1], 1e-30))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= scale * parameter.grad
        losses.append(loss.item())
        for name, value in metrics.items():
            values.setdefault(name, []).append(value)
    found = {name: float(torch.cat(parts).mean()) for name, parts in values.items()}
    return found | {"loss": sum(losses) / config.updates_per_step, "grad_norm": max(norms)}


def load(folder, dtype):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()


def logprobs_of(folder, completions, temperature):
    """The model's log-probs of each completion's tokens, in float64."""
    rows = Rows(completions, torch.float64)
    with torch.no_grad():
        found, _ = rows.score(load(folder, torch.float64), temperature)
    return [row[len(c.prompt_ids) - 1:c.num_tokens - 1].tolist() for row, c in zip(found, completions, strict=True)]


def learn_all(folder, config, steps, dtype=torch.float64):
    """Metrics of each rollout, and the weights after all of them."""
    model = load(folder, dtype)
    frozen = copy.deepcopy(model)
    results = []
    for number, completions in enumerate(steps, 1):
        results.append(learn(model, frozen, completions, config, dtype))
        if config.loss.ref_model_sync_steps and number % config.loss.ref_model_sync_steps == 0:
            share = config.loss.ref_model_mixup_alpha
            with torch.no_grad():
                for old, new in zip(frozen.parameters(), model.parameters(), strict=True):
                    old.mul_(1 - share).add_(share * new)
    return results, {name: parameter.detach() for name, parameter in model.named_parameters()}
