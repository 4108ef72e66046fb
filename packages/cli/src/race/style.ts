/** Colors by day and by night. */
export const colors = `:root {
  --ground: #f6f7f9; --card: #fff; --ink: #1b2330; --soft: #5a6577; --line: #d5dae3; --box: #f9fafc;
  --ok: #17713b; --ok-soft: #e0f4e7; --race: #b3261e; --race-soft: #fde8e6; --wait: #8a5a00; --wait-soft: #fdf0d0;
  --stale: #7a2fb8; --stale-soft: #f4e9fc; --accent: #2459b8; --transaction: #8fb0e8;
}
@media (prefers-color-scheme: dark) {
  :root {
    --ground: #11151c; --card: #1a202a; --ink: #e6eaf1; --soft: #9ba6b8; --line: #364052; --box: #222a36;
    --ok: #6fd699; --ok-soft: #16351f; --race: #ff8f86; --race-soft: #421a18; --wait: #f2c14e; --wait-soft: #3d3011;
    --stale: #d0a3ff; --stale-soft: #332145; --accent: #8db4ff; --transaction: #45659c;
  }
}
`;

/** For a drawn schedule, on a page or as a file of its own. */
export const picture = `.schedule { display: block; font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; }
.schedule text { fill: var(--ink); }
.schedule .actor { font-weight: 700; }
.schedule .number, .schedule .place, .schedule .switch text { fill: var(--soft); }
.schedule .life { stroke: var(--line); stroke-width: 1.5; }
.schedule .transaction { fill: var(--transaction); }
.schedule .stub { stroke: var(--line); stroke-width: 1.5; }
.schedule .step rect { fill: var(--box); stroke: var(--line); }
.schedule .read { fill: var(--accent); font-weight: 600; }
.schedule .stale { fill: var(--stale); font-weight: 600; } .schedule .outdated rect { fill: var(--stale-soft); stroke: var(--stale); }
.schedule .error { fill: var(--race); font-weight: 600; } .schedule .failed rect { fill: var(--race-soft); stroke: var(--race); }
.schedule .switch path { stroke: var(--soft); stroke-dasharray: 5 4; fill: none; }
.schedule .wait text { fill: var(--wait); } .schedule .hourglass, .schedule .tip { fill: var(--wait); }
.schedule .bar { fill: var(--wait-soft); stroke: var(--wait); } .schedule .stripe { stroke: var(--wait); stroke-width: 1.5; opacity: .55; }
.schedule .release { stroke: var(--wait); stroke-width: 1.5; fill: none; } .schedule .end { stroke: var(--wait); stroke-width: 2.5; }
`;

export const style = `
${colors}* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 1040px; margin: 0 auto; padding: 24px 16px 48px; }
h1 { font-size: 1.5rem; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin: 0 0 8px; overflow-wrap: anywhere; }
h3 { font-size: 1rem; margin: 20px 0 4px; }
p { margin: 4px 0; overflow-wrap: anywhere; }
a { color: var(--accent); }
code, pre { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; }
pre { margin: 8px 0; font-size: 13px; }
pre.error { white-space: pre-wrap; overflow-wrap: anywhere; color: var(--race); background: var(--race-soft); padding: 8px 12px; border-radius: 6px; }
header .ok { color: var(--ok); } header .race { color: var(--race); }
nav ul, .legend { list-style: none; padding: 0; margin: 12px 0; display: flex; flex-wrap: wrap; gap: 8px 20px; }
section { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 16px 20px; margin-top: 16px; }
.badge { display: inline-block; font-size: .8rem; font-weight: 600; padding: 1px 9px; border-radius: 99px; white-space: nowrap; vertical-align: 2px; }
.badge.ok { color: var(--ok); background: var(--ok-soft); }
.badge.race, .badge.error { color: var(--race); background: var(--race-soft); }
dl { display: flex; flex-wrap: wrap; gap: 4px 32px; margin: 8px 0; }
dt { color: var(--soft); font-size: .8rem; } dd { margin: 0; }
table { border-collapse: collapse; font-size: .9rem; margin: 8px 0; }
caption { text-align: start; color: var(--soft); font-size: .8rem; }
th, td { text-align: start; padding: 3px 20px 3px 0; border-top: 1px solid var(--line); vertical-align: top; }
thead th { border: 0; color: var(--soft); font-weight: 400; } tbody th { font-weight: 600; }
.copy { display: inline-block; background: var(--box); border: 1px solid var(--line); border-radius: 6px; padding: 3px 9px; font-size: 13px; user-select: all; -webkit-user-select: all; overflow-wrap: anywhere; }
details { margin-top: 16px; } summary { cursor: pointer; color: var(--accent); }
.scroll { overflow-x: auto; } .narrow { display: none; }
:focus-visible { outline: 2px solid var(--accent); outline-offset: 2px; }
${picture}.legend { font-size: .8rem; color: var(--soft); gap: 4px 16px; margin: 6px 0 0; }
.legend i { display: inline-block; width: 18px; height: 10px; margin-right: 6px; border: 1px solid; border-radius: 2px; }
.legend .l-transaction { width: 5px; height: 13px; border: 0; border-radius: 3px; background: var(--transaction); vertical-align: -2px; }
.legend .l-wait { color: var(--wait); background: repeating-linear-gradient(45deg, var(--wait-soft) 0 3px, var(--wait) 3px 4px); }
.legend .l-release { color: var(--wait); height: 0; border-width: 2px 0 0; vertical-align: 3px; }
.legend .l-stale { color: var(--stale); background: var(--stale-soft); }
.legend .l-error { color: var(--race); background: var(--race-soft); }
.legend .l-switch { color: var(--soft); height: 0; border-width: 1px 0 0; border-style: dashed; vertical-align: 3px; }
@media (max-width: 720px) {
  main { padding: 16px 8px 32px; } section { padding: 12px 12px; }
  .wide { display: none; } .narrow { display: block; }
}
@media print { body { background: none; } .scroll { overflow: visible; } }
`;
