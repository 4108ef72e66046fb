/** What must be true of every ledger of quotas, whatever was called in which order: replayed entry by entry. */
import { sql } from "holdfast";
import { execute } from "holdfast/testing";
import { expect } from "vitest";
import { type Site, json, microseconds, ourTable } from "./sites.ts";

/** An entry as the table has it; moments in microseconds. */
export interface Line {
  readonly version: number;
  readonly kind: string;
  readonly id: string;
  readonly entry: string | null;
  readonly amount: number;
  readonly delta: number;
  readonly forgotten: number;
  readonly refunded: number;
  readonly used: number;
  readonly held: number;
  readonly credit: number;
  readonly max: number | null;
  readonly since: number | null;
  readonly at: number;
  readonly drains: readonly { id: string; amount: number }[] | null;
  readonly metadata: Readonly<Record<string, unknown>> | null;
}

/** Of one subject, in their order. */
export async function linesOf(
  backend: string,
  site: Pick<Site, "database">,
  quota: string,
  subject: string,
): Promise<Line[]> {
  const rows = await execute(
    site,
    sql`SELECT l.version, l.kind, l.id, l.entry, l.amount, coalesce(l.delta, l.amount) AS delta,
  coalesce(l.forgotten, 0) AS forgotten, coalesce(l.refunded, 0) AS refunded, l.used, coalesce(l.held, 0) AS held,
  coalesce(l.credit, 0) AS credit, l.max, ${microseconds(backend, "l", "since")} AS since, ${microseconds(backend, "l", "at")} AS at,
  l.drains, l.details FROM ${ourTable(backend, "quota_line")} l JOIN ${ourTable(backend, "quota_bucket")} b ON b.id = l.bucket
  WHERE b.quota = ${quota} AND b.subject = ${subject} ORDER BY l.version`,
  );
  return rows.map((row) => {
    const details = json(row["details"]) as { metadata?: Line["metadata"] } | null;
    return {
      version: Number(row["version"]),
      kind: String(row["kind"]),
      id: String(row["id"]),
      entry: row["entry"] === null ? null : String(row["entry"]),
      amount: Number(row["amount"]),
      delta: Number(row["delta"]),
      forgotten: Number(row["forgotten"]),
      refunded: Number(row["refunded"]),
      used: Number(row["used"]),
      held: Number(row["held"]),
      credit: Number(row["credit"]),
      max: row["max"] === null ? null : Number(row["max"]),
      since: row["since"] === null ? null : Number(row["since"]),
      at: Number(row["at"]),
      drains: json(row["drains"]) as Line["drains"],
      metadata: details?.metadata ?? null,
    };
  });
}

export interface Rule {
  readonly limit: number | { readonly plans: Readonly<Record<string, number>>; readonly default: string };
  /** Milliseconds. */
  readonly per?: number;
  readonly window?: "fixed" | "sliding-log" | "sliding-parts" | "refill";
  readonly parts?: number;
}

interface Grant {
  left: number;
  readonly id: string;
  readonly priority: number;
  readonly until: number;
}

const uses = (kind: string) => kind === "consume" || kind === "settle";
const sum = (of: readonly number[]) => of.reduce((total, each) => total + each, 0);

export function checkLedger(rule: Rule, lines: readonly Line[], hint: string): void {
  const say = (line: Line, what: string) =>
    `${hint}: version ${line.version} (${line.kind} ${line.id}): ${what}`;
  expect(
    lines.map(({ version }) => version),
    `${hint}: versions have no gaps`,
  ).toEqual(lines.map((_, i) => i + 1));
  expect(new Set(lines.map(({ id }) => id)).size, `${hint}: each id is there once`).toBe(lines.length);
  limits(rule, lines, say);
  chain(lines, say);
  windowsGoOn(rule, lines, say);
  holds(lines, say);
  credits(lines, say);
  refunds(lines, say);
  counted(rule, lines, say);
}

type Say = (line: Line, what: string) => string;

/** Each entry follows from the one before. */
function chain(lines: readonly Line[], say: Say): void {
  let used = 0;
  for (const line of lines) {
    expect(line.used, say(line, "used follows from the entry before")).toBe(
      used - line.forgotten + line.delta,
    );
    expect(line.forgotten, say(line, "forgets what there was")).toBeLessThanOrEqual(used);
    if (uses(line.kind))
      expect(line.delta, say(line, "what is not of grants is of the limit")).toBe(
        line.amount - sum((line.drains ?? []).map(({ amount }) => amount)),
      );
    used = line.used;
  }
}

/** No window comes again after a later one. */
function windowsGoOn({ per = 0, window = "fixed" }: Rule, lines: readonly Line[], say: Say): void {
  let newest = 0;
  for (const line of lines) {
    if (line.since === null) continue;
    expect(line.since, say(line, "windows never rewind")).toBeGreaterThanOrEqual(newest);
    newest = line.since;
    if (per > 0 && window === "fixed") {
      expect(line.since, say(line, "in its window")).toBe(Math.floor(line.at / (per * 1000)) * per * 1000);
    }
  }
}

/** Never above the limit that is in force, except for what was held before and for what was used before it was lowered. */
function limits({ limit }: Rule, lines: readonly Line[], say: Say): void {
  const plans = typeof limit === "number" ? {} : limit.plans;
  let own: number | undefined;
  let plan: string | undefined;
  let last: Line | undefined;
  for (const line of lines) {
    if (line.kind === "limit") own = (line.metadata?.["limit"] as number | null) ?? undefined;
    if (line.kind === "plan") plan = (line.metadata?.["plan"] as string | null) ?? undefined;
    const common = typeof limit === "number" ? limit : (plans[plan ?? limit.default] as number);
    const inForce = own ?? common;
    if (line.max !== null) expect(line.max, say(line, "the limit in force")).toBe(inForce);
    const above = line.used + line.held - line.credit - inForce;
    if (line.kind === "consume" || line.kind === "hold")
      expect(above, say(line, "never above the limit")).toBeLessThanOrEqual(0);
    const before = last ? last.used - line.forgotten + last.held - last.credit - inForce : 0;
    if (line.kind === "settle")
      expect(above, say(line, "what is settled was held, or there is room")).toBeLessThanOrEqual(
        Math.max(0, before),
      );
    last = line;
  }
}

/** What is held is the sum of the holds that are open, and each of them ends once. */
function holds(lines: readonly Line[], say: Say): void {
  const open = new Map<string, number>();
  for (const line of lines) {
    if (line.kind === "hold") open.set(line.id, line.amount);
    if (["settle", "release", "expire"].includes(line.kind)) {
      expect(open.has(line.entry ?? ""), say(line, "ends a hold that is open")).toBe(true);
      open.delete(line.entry ?? "");
    }
    expect(line.held, say(line, "held is the sum of open holds")).toBe(sum([...open.values()]));
  }
}

/** Credits go to whom they belong first, are never spent twice, and come back to the grant they came from. */
function credits(lines: readonly Line[], say: Say): void {
  const grants = new Map<string, Grant>();
  const drained = new Map<string, { drains: readonly { id: string; amount: number }[]; refunded: number }>();
  for (const line of lines) {
    if (line.kind === "grant") {
      const until = ((line.metadata?.["until"] as number | undefined) ?? Infinity) * 1000;
      const priority = line.metadata?.["priority"] as number;
      grants.set(line.id, { id: line.id, left: line.amount, priority, until });
    }
    if (line.kind === "lapse") {
      const grant = grants.get(line.entry ?? "") as Grant;
      expect(grant?.left, say(line, "what lapses is what was left")).toBe(line.amount);
      expect(grant.until, say(line, "lapses in its time")).toBeLessThanOrEqual(line.at);
      grants.delete(grant.id);
    }
    if (uses(line.kind)) drained.set(line.id, { drains: line.drains ?? [], refunded: 0 });
    if (line.kind === "refund") giveBack(line, grants, drained);
    const wanted = [...grants.values()]
      .filter(({ left, until }) => left > 0 && until > line.at)
      .toSorted((a, b) => a.priority - b.priority || compare(a.until, b.until) || (a.id < b.id ? -1 : 1));
    for (const [i, drain] of (line.drains ?? []).entries()) {
      expect(drain.id, say(line, "grants are used in their order")).toBe(wanted[i]?.id);
      const grant = wanted[i] as Grant;
      expect(drain.amount, say(line, "a grant is not spent twice")).toBeLessThanOrEqual(grant.left);
      if (i < (line.drains?.length ?? 0) - 1)
        expect(drain.amount, say(line, "used up first")).toBe(grant.left);
      grant.left -= drain.amount;
    }
    expect(line.credit, say(line, "credit is what is left of the grants")).toBe(
      sum([...grants.values()].map(({ left }) => left)),
    );
  }
}

const compare = (a: number, b: number) => (a === b ? 0 : a < b ? -1 : 1);

function giveBack(
  line: Line,
  grants: ReadonlyMap<string, Grant>,
  drained: ReadonlyMap<string, { drains: readonly { id: string; amount: number }[]; refunded: number }>,
): void {
  const of = drained.get(line.entry ?? "");
  if (!of) return;
  let back = line.amount;
  let before = of.refunded;
  of.refunded += line.amount;
  for (const { id, amount } of of.drains.toReversed()) {
    const part = Math.min(back, Math.max(0, amount - before));
    before = Math.max(0, before - amount);
    back -= part;
    const grant = grants.get(id);
    if (grant) grant.left += part;
  }
}

/** Of entries that are there, and never more than these. */
function refunds(lines: readonly Line[], say: Say): void {
  const given = new Map<string, number>();
  const used = new Map(lines.filter(({ kind }) => uses(kind)).map((line) => [line.id, line]));
  for (const line of lines) {
    if (line.kind !== "refund") continue;
    const of = used.get(line.entry ?? "") as Line;
    expect(of?.version, say(line, "of an entry before it")).toBeLessThan(line.version);
    given.set(of.id, (given.get(of.id) ?? 0) + line.amount);
    expect(given.get(of.id), say(line, "never more than it was")).toBeLessThanOrEqual(of.amount);
    expect(-line.delta, say(line, "gives back")).toBeGreaterThanOrEqual(0);
    expect(-line.delta, say(line, "gives back what it says")).toBeLessThanOrEqual(line.amount);
  }
  for (const line of used.values())
    expect(line.refunded, say(line, "knows its refunds")).toBe(given.get(line.id) ?? 0);
}

/** What is counted is what the entries of the window come to, less what was given back of them. */
function counted(
  { limit, per = 0, window = "fixed", parts = 20 }: Rule,
  lines: readonly Line[],
  say: Say,
): void {
  const perUs = per * 1000;
  /** Of each use since the last reset: when, and what is left of it. */
  let open: { readonly id: string; readonly at: number; readonly since: number | null; left: number }[] = [];
  let last: Line | undefined;
  for (const line of lines) {
    if (line.kind === "reset") open = [];
    if (uses(line.kind)) open.push({ id: line.id, at: line.at, since: line.since, left: line.delta });
    if (line.kind === "refund") {
      const of = open.find(({ id }) => id === line.entry);
      if (of) of.left += line.delta;
    }
    const within = (age: number) => sum(open.filter(({ at }) => line.at - at < age).map(({ left }) => left));
    if (per === 0)
      expect(line.used, say(line, "used is the sum of what was")).toBe(sum(open.map(({ left }) => left)));
    else if (window === "fixed")
      expect(line.used, say(line, "used is the sum of its window")).toBe(
        sum(open.filter(({ since }) => since === line.since).map(({ left }) => left)),
      );
    else if (window === "sliding-log")
      expect(line.used, say(line, "used is the sum of the time before")).toBe(within(perUs));
    else if (window === "sliding-parts") {
      expect(line.used, say(line, "nothing is given back too early")).toBeGreaterThanOrEqual(within(perUs));
      expect(line.used, say(line, "nor later than one part")).toBeLessThanOrEqual(
        within(perUs + perUs / parts),
      );
    } else if (typeof limit === "number") {
      // One unit may have been under way already.
      const most = last ? ((line.at - last.at) * limit) / perUs + 1 : 0;
      expect(line.forgotten, say(line, "no more comes back than time gives")).toBeLessThanOrEqual(most);
    }
    last = line;
  }
  if (window === "refill" && typeof limit === "number") bursts(limit, perUs, lines, say);
}

/** In any time, at most what there can be at once, and what comes back meanwhile. */
function bursts(limit: number, perUs: number, lines: readonly Line[], say: Say): void {
  const used = lines.filter(({ kind }) => uses(kind));
  for (const [i, first] of used.entries()) {
    let total = 0;
    for (const line of used.slice(i)) {
      total += line.delta;
      const most = limit + ((line.at - first.at) * limit) / perUs;
      expect(total, say(line, `since version ${first.version}`)).toBeLessThanOrEqual(most);
    }
  }
}
