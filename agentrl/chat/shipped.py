"""Chat templates for models that have none: two shipped ones, or any jinja file."""

from __future__ import annotations

from pathlib import Path

from agentrl.errors import ConfigError

_TOOLS = """\
{%- macro explain(tools) %}
{{- 'You can call these tools:' }}
{%- for tool in tools %}{{ '\\n' + (tool | tojson) }}{% endfor %}
{{- '\\n\\nTo call one, write:\\n<tool_call>\\n' }}
{{- '{"name": "TOOL", "arguments": {"ARGUMENT": "VALUE"}}\\n</tool_call>' }}
{%- endmacro %}
{%- macro said(message) %}
{{- message.content }}
{%- for call in message.tool_calls or [] %}
{{- '\\n' if message.content or not loop.first else '' }}
{{- '<tool_call>\\n{"name": ' + (call.function.name | tojson) + ', "arguments": ' }}
{{- (call.function.arguments | tojson) + '}\\n</tool_call>' }}
{%- endfor %}
{%- endmacro %}
{%- set has_system = messages[0].role == 'system' %}
{%- set opening = messages[0].content if has_system else '' %}
{%- if tools %}
{%- set opening = opening + ('\\n\\n' if opening else '') + explain(tools) %}
{%- endif %}
"""

CHATML = (
    _TOOLS
    + """\
{%- if opening %}{{ '<|im_start|>system\\n' + opening + '<|im_end|>\\n' }}{% endif %}
{%- for message in (messages[1:] if has_system else messages) %}
{{- '<|im_start|>' + message.role + '\\n' + said(message) + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
)

PLAIN = (
    _TOOLS
    + """\
{{- bos_token if bos_token else '' }}
{%- if opening %}{{ 'System:\\n' + opening + '\\n\\n' }}{% endif %}
{%- for message in (messages[1:] if has_system else messages) %}
{{- message.role | capitalize + ':\\n' + said(message) }}
{{- eos_token + '\\n' if message.role == 'assistant' else '\\n\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ 'Assistant:\\n' }}{% endif %}"""
)

SHIPPED = {"chatml": CHATML, "plain": PLAIN}
"""chatml needs the tokens `<|im_start|>` and `<|im_end|>`, plain an end-of-text token only."""


def template_text(name: str) -> str:
    """The text of a shipped template, or of a file.

    Raises:
        ConfigError: it is neither.
    """
    if name in SHIPPED:
        return SHIPPED[name]
    try:
        return Path(name).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"chat.template={name!r} is neither a shipped template ({', '.join(SHIPPED)}) nor a"
            f" file that can be read: {error}"
        ) from error
