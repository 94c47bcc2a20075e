"""The HTML page of a report: one file, nothing loaded from anywhere, readable on light and on dark."""

from __future__ import annotations

_TEMPLATE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{{ report.title }}</title>
<style>
:root {
  --page: #fbfbfa; --card: #ffffff; --ink: #1c2126; --soft: #5b6670; --line: #e3e5e6;
  --flat: #0b7a6b; --grows: #b4380f; --other: #5b6670;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #14171a; --card: #1b1f23; --ink: #e8eaec; --soft: #9aa5ae; --line: #2e343a;
    --flat: #3cc7b0; --grows: #f08a5d; --other: #9aa5ae;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--page); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
}
main { max-width: 1120px; margin: 0 auto; padding: 48px 24px 72px; }
h1 { font-size: 34px; line-height: 1.15; letter-spacing: -0.02em; margin: 0 0 18px; }
h2 { font-size: 23px; letter-spacing: -0.01em; margin: 56px 0 6px; }
h3 { font-size: 16px; margin: 34px 0 2px; }
p { margin: 4px 0 14px; max-width: 80ch; }
.soft { color: var(--soft); }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 2px 18px; margin: 0; font-size: 15px; }
dt { color: var(--soft); }
dd { margin: 0; }
ul.verdicts { list-style: none; margin: 18px 0 0; padding: 0; display: grid; gap: 10px; }
ul.verdicts li {
  background: var(--card); border: 1px solid var(--line); border-left: 5px solid var(--engine);
  border-radius: 8px; padding: 11px 16px;
}
.engine { font: 600 14.5px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; margin-right: 8px; }
.badge {
  font-size: 12px; font-weight: 600; letter-spacing: 0.03em; border: 1px solid currentColor; border-radius: 20px;
  padding: 0 8px; color: var(--other); white-space: nowrap;
}
.badge.flat { color: var(--flat); }
.badge.grows, .badge.failed { color: var(--grows); }
.verdict { display: block; margin-top: 3px; }
figure { margin: 0; }
figure svg { width: 100%; height: auto; display: block; }
.plot { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 14px; }
figcaption { color: var(--soft); font-size: 14px; margin: 6px 0 0; max-width: 90ch; }
.wide { overflow-x: auto; border: 1px solid var(--line); border-radius: 10px; background: var(--card); }
table { border-collapse: collapse; font-size: 13.5px; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: 7px 12px; text-align: right; border-top: 1px solid var(--line); white-space: nowrap; }
th {
  border-top: 0; color: var(--soft); font-weight: 600; vertical-align: bottom; white-space: normal; min-width: 74px;
}
th.long { min-width: 128px; }
th:nth-child(-n+2), td:nth-child(-n+2) { text-align: left; }
td:first-child { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; font-size: 12.5px; }
td.long { white-space: normal; text-align: left; min-width: 260px; }
ul.notes { padding-left: 20px; margin: 6px 0; max-width: 92ch; font-size: 15px; }
pre {
  white-space: pre-wrap; background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 12px 16px;
  font: 13px/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace;
}
</style>
</head>
<body>
<main>
<h1>{{ report.title }}</h1>
<dl>
{% for name, value in report.facts %}<dt>{{ name }}</dt><dd>{{ value }}</dd>
{% endfor %}</dl>
{% for section in report.sections %}
<section>
<h2>{{ section.name }}</h2>
<p class="soft">{{ section.line }}</p>
<ul class="verdicts">
{% for verdict in section.verdicts %}<li style="--engine: {{ verdict.colour }}"><span class="engine">\
{{ verdict.engine }}</span><span class="badge {{ verdict.kind }}">{{ badges[verdict.kind] }}</span>\
<span class="verdict">{{ verdict.text }}</span></li>
{% endfor %}</ul>
{% for figure in section.figures %}
<h3>{{ figure.title }}</h3>
<figure id="{{ figure.name }}"><div class="plot">{{ figure.svg | safe }}</div>
<figcaption>{{ figure.caption }}</figcaption></figure>
{% endfor %}
<h3>All figures</h3>
<div class="wide"><table>
<thead><tr>{% for column in report.columns %}<th scope="col"\
{% if column | length > 20 %} class="long"{% endif %}>{{ column }}</th>{% endfor %}</tr></thead>
<tbody>
{% for row in section.table %}<tr>{% for cell in row %}<td{% if cell | length > 34 and loop.index > 2 %} class="long"\
{% endif %}>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}</tbody></table></div>
</section>
{% endfor %}
<section>
<h2>How this was measured</h2>
<ul class="notes">
{% for note in report.notes %}<li>{{ note }}</li>
{% endfor %}{% for engine, versions in report.versions %}<li><span class="engine">{{ engine }}</span>{{ versions }}</li>
{% endfor %}</ul>
{% for command in report.commands %}<pre>$ {{ command }}</pre>
{% endfor %}
</section>
</main>
</body>
</html>
"""

_BADGES = {
    "flat": "flat",
    "noise": "within noise",
    "grows": "grows",
    "reference": "reference",
    "failed": "not measured",
    "unjudged": "not judged",
}


def render(report: object) -> str:
    """The page of a `flatbed.lab.report.Report`, whose attributes it shows."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined)
    return environment.from_string(_TEMPLATE).render(report=report, badges=_BADGES)
