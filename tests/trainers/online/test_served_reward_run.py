"""A run against a served reward model stops when its version is withdrawn, and goes on with the
older one.
"""

from __future__ import annotations

from preference_cases import app, planted_pairs, tiny_policy, write_rows
from reward_cases import ranked_pairs, reward_folder, serving

from agentrl.records.files import read_episodes, read_metrics
from agentrl.verifiers.models.reward_service import RewardStore
from agentrl.verifiers.models.served_reward import forget_versions

CONFIG = """
env = "chat-v0"
env_settings = {{prompts = "{prompts}", reward = "{url}", max_tokens = 8}}
model = "{model}"
steps = {steps}
tasks_per_step = 2
group_size = 4
save_every = 1
eval_every = 0
quiet_rounds = 100
"""


def test_rewards_of_two_versions_never_meet_in_a_round_and_the_change_is_told(tmp_path, capsys):
    store, run = RewardStore(tmp_path / "rewards"), tmp_path / "run"
    store.publish(reward_folder(tmp_path / "a", 1), ranked_pairs())
    store.publish(reward_folder(tmp_path / "b", 2), anyway=True)
    prompts = write_rows(tmp_path / "prompts.jsonl", planted_pairs())
    forget_versions()
    with serving(store) as (url, _):

        def train(steps, *words):
            config = tmp_path / "train.toml"
            config.write_text(
                CONFIG.format(prompts=prompts, url=url, model=tiny_policy(), steps=steps)
            )
            code = app("train", config, "--out", run, *words)
            return code, capsys.readouterr()

        code, said = train(2)
        assert code == 0, said.err
        store.rollback("it likes everything")
        code, said = train(4, "--resume")
        assert code == 2
        assert "version 2 was withdrawn (it likes everything); version 1 is served" in said.err
        assert "--resume trains on with the version that is served now" in said.err
        code, said = train(4, "--resume")
        assert code == 0, said.err
    versions = [
        row["reward/part/reward_model_version"] for row in read_metrics(run / "metrics.jsonl")
    ]
    assert versions == [2, 2, 1, 1]
    assert "version changed from 2 to 1 at step 3" in " ".join(said.err.split())
    rounds: dict[int, set[float]] = {}
    for one in read_episodes(run / "episodes.jsonl").values():
        rounds.setdefault(one.key.step, set()).add(one.score.parts["reward_model_version"])
    assert [rounds[step] for step in sorted(rounds)] == [{2.0}, {2.0}, {1.0}, {1.0}]


def test_a_run_in_which_nothing_was_scored_says_why_and_keeps_its_checkpoint(tmp_path, capsys):
    rule = tmp_path / "rule.py"
    rule.write_text("def rule(prompt, answer):\n    raise RuntimeError('no judge today')\n")
    prompts, config = write_rows(tmp_path / "p.jsonl", planted_pairs()), tmp_path / "train.toml"
    text = CONFIG.format(prompts=prompts, url=f"{rule}:rule", model=tiny_policy(), steps=2)
    config.write_text(text)
    assert app("train", config, "--out", tmp_path / "run") == 1
    said = " ".join(capsys.readouterr().err.split())
    assert "no episode was scored in 2 rounds: infrastructure failed every episode" in said
    assert "no judge today" in said and (tmp_path / "run/checkpoints/step_2").is_dir()
