/**
 * What a quota decides is written once (`quota/decide`), and PostgreSQL has functions that decide the same in one round trip.
 * Here random calls run through the functions on a real server and through the decision: the answers are the same, and so
 * is every column of every row that they leave.
 */
import { fromPg } from "holdfast/pg";
import { holdfast } from "holdfast";
import { Pool, type PoolClient } from "pg";
import { afterAll, beforeAll, describe, expect, inject, test } from "vitest";
import type { Pinned, SqlConnection } from "../../../packages/holdfast/src/seam/database.ts";
import { storeDialect } from "../../../packages/holdfast/src/engines/postgres/store-dialect.ts";
import { quotaStore } from "../../../packages/holdfast/src/engines/sql/quota/index.ts";
import { decideAmendment, standingNow } from "../../../packages/holdfast/src/quota/decide/amend.ts";
import { QuotaLedger, repair } from "../../../packages/holdfast/src/quota/decide/check.ts";
import { type LookForIds, decideUses } from "../../../packages/holdfast/src/quota/decide/consume.ts";
import type { BucketRow } from "../../../packages/holdfast/src/quota/decide/rows.ts";
import { counts } from "../../../packages/holdfast/src/quota/decide/windows.ts";
import type { Amendment, UseBatch, Quotas } from "../../../packages/holdfast/src/quota/store.ts";
import { type TestDatabase, createDatabase, unavailable } from "../../harness/databases.ts";
import { Calls, type Kept, quotas, subjects } from "./calls.ts";
import { Reader, type State, applied, decided, readState, sorted } from "./state.ts";

const long = process.env["HOLDFAST_LONG"] === "1";
const seeds = long ? 100 : 3;
const steps = 200;
const why = unavailable("postgres");
const how = { waitMs: 60_000, free: true };
const generic = quotaStore(storeDialect);

let database: TestDatabase;
let pool: Pool;
let pinned: Pinned<PoolClient, SqlConnection>;
let functions: Quotas<SqlConnection>;

beforeAll(async () => {
  if (why !== undefined) return;
  database = await createDatabase("postgres");
  pool = new Pool({ connectionString: database.url, max: 2 });
  const site = fromPg(pool);
  await holdfast(site).migrate();
  pinned = (await site.connect?.({ use: "session", locks: [], wait: 5000 })) as typeof pinned;
  functions = site.engine.quotas as Quotas<SqlConnection>;
});

afterAll(async () => {
  await pinned?.release();
  await pool?.end();
  await database?.drop();
});

const own = (state: State, quota: string, subject: string) => {
  const row = state.buckets.find((each) => each.quota === quota && each.subject === subject);
  const is = (each: { quota: string; subject: string }) => each.quota === quota && each.subject === subject;
  return {
    row,
    lines: state.lines.filter(({ bucket }) => bucket === row?.id),
    holds: state.holds.filter(is),
    grants: state.grants.filter(is),
  };
};

/** Buckets that a call has made. */
function made(before: State, after: State): State {
  const known = new Set(before.buckets.map(({ id }) => id));
  const empty = { used: 0, held: 0, credit: 0, version: 0, reset: 0, since: undefined, parts: undefined };
  const rest = { own_limit: undefined, plan: undefined, rolled: undefined };
  const home = { moves: undefined, moved_to: undefined, moved_from: undefined };
  const fresh = after.buckets
    .filter(({ id }) => !known.has(id))
    .map(({ id, quota, subject }): BucketRow => ({ id, quota, subject, ...empty, ...rest, ...home }));
  return sorted({ ...before, buckets: [...before.buckets, ...fresh] });
}

const microseconds = (ms: number) => Math.round(ms * 1000);

async function consume(batch: UseBatch, hint: string): Promise<string[]> {
  const before = await readState(pool);
  const answer = await functions.consume(pinned.connection, batch, how);
  const after = await readState(pool);
  const start = made(before, after);
  const now = microseconds(answer.at);
  const wanted = batch.buckets.map(({ quota, subject, definition }, place) => ({
    quota,
    subject,
    rule: batch.definitions[definition]?.rule as never,
    ids: batch.uses.filter(({ bucket }) => bucket === place).map(({ id }) => id),
    holds: batch.uses
      .filter(({ bucket, holdMs }) => bucket === place && holdMs !== undefined)
      .map(({ id }) => id),
    allGrants: false,
  }));
  // All ways to look for ids come to the same; what could not be written is decided again.
  for (const first of batch.look ? [true, "refused" as const] : [false])
    for (let look: LookForIds = first; ; look = true) {
      const reader = new Reader(start, wanted, now);
      const { verdicts, writes } = decided(reader, (buckets) =>
        decideUses({ now, buckets }, { ...batch, look }),
      );
      const expected = applied(start, writes);
      if (!expected && look !== true) continue;
      expect(answer, hint).toEqual(verdicts);
      expect(after, hint).toEqual(expected);
      break;
    }
  return answer.missing ? ["late"] : answer.verdicts.map(({ kind }) => kind);
}

async function amend(amendment: Amendment, hint: string): Promise<string> {
  const before = await readState(pool);
  const answer = await functions.amend(pinned.connection, amendment, how);
  if ("elsewhere" in answer) return expect.unreachable("nothing was moved");
  const after = await readState(pool);
  const start = made(before, after);
  // The answer of then has the moment of then.
  const { lines } = own(start, amendment.bucket.quota, amendment.bucket.subject);
  const known = lines.some(({ id }) => id === amendment.id);
  const now = microseconds("late" in answer ? answer.late : known ? Date.now() : answer.at);
  const about = "of" in amendment ? amendment.of : undefined;
  const ids = about === undefined ? [amendment.id] : [amendment.id, about];
  const reader = new Reader(
    start,
    [
      {
        ...amendment.bucket,
        rule: amendment.definition.rule,
        ids,
        holds: about === undefined ? [] : [about],
        allGrants: true,
      },
    ],
    now,
  );
  const { verdicts, writes } = decided(reader, ([bucket]) =>
    decideAmendment({ now, bucket: bucket as never }, amendment),
  );
  expect(answer, hint).toEqual(verdicts);
  expect(after, hint).toEqual(applied(start, writes));
  return "late" in answer ? "late" : `${amendment.kind} ${answer.kind}`;
}

async function peek(calls: Calls, of: Kept, subject: string, hint: string): Promise<void> {
  const state = await readState(pool);
  const bucket = { quota: of.name, subject, limit: of.limit };
  const definition = calls.definition(of, Date.now());
  const answer = await functions.peek(pinned.connection, definition, bucket, how);
  if ("elsewhere" in answer) return expect.unreachable("nothing was moved");
  const now = microseconds("late" in answer ? answer.late : answer.at);
  const { row, lines, holds, grants } = own(state, of.name, subject);
  const open = <T extends { until: number }>(rows: readonly T[], amount: (row: T) => number) =>
    rows.filter(({ until }) => until > now).reduce((sum, each) => sum + amount(each), 0);
  const view = {
    now,
    row,
    held: open(holds, ({ amount }) => amount),
    credit: open(grants, ({ amount, spent }) => amount - spent),
    counted: definition.rule.window === "log" ? counts(lines.toReversed(), definition.rule.per, now) : 0,
  };
  expect(answer, hint).toEqual(standingNow(view, definition, bucket));
}

/** Time passes: everything of a bucket is so much older. */
async function age(quota: string, subject: string, by: number): Promise<void> {
  const earlier = (column: string) => `${column} = ${column} - $3::bigint * interval '1 microsecond'`;
  const which = "quota = $1 AND subject = $2";
  const number = `(SELECT id FROM holdfast.quota_bucket WHERE ${which})`;
  for (const text of [
    `UPDATE holdfast.quota_bucket SET ${earlier("since")} WHERE ${which}`,
    `UPDATE holdfast.quota_line SET ${earlier("since")}, ${earlier("at")} WHERE bucket = ${number}`,
    `UPDATE holdfast.quota_hold SET ${earlier("until")} WHERE ${which}`,
    `UPDATE holdfast.quota_grant SET ${earlier("until")} WHERE ${which}`,
  ])
    await pool.query(text, [quota, subject, by]);
}

const damages = [
  "UPDATE holdfast.quota_bucket SET used = used + 3 WHERE id = $1",
  "UPDATE holdfast.quota_bucket SET held = held + 2, credit = credit + 1 WHERE id = $1",
  "UPDATE holdfast.quota_bucket SET version = version + 2 WHERE id = $1",
  "UPDATE holdfast.quota_bucket SET since = since - interval '1 hour' WHERE id = $1",
  "UPDATE holdfast.quota_bucket SET parts[2] = parts[2] + 1 WHERE id = $1 AND parts IS NOT NULL",
  "DELETE FROM holdfast.quota_line WHERE bucket = $1 AND version % 5 = 3",
  "UPDATE holdfast.quota_line SET used = used + 1 WHERE bucket = $1 AND version % 7 = 3",
  "UPDATE holdfast.quota_line SET amount = amount + 1 WHERE bucket = $1 AND version % 6 = 2 AND kind IN ('consume', 'hold', 'grant')",
  "UPDATE holdfast.quota_line SET held = coalesce(held, 0) + 1 WHERE bucket = $1 AND version % 6 = 1",
  "DELETE FROM holdfast.quota_hold h USING holdfast.quota_bucket b WHERE b.id = $1 AND h.quota = b.quota AND h.subject = b.subject",
];

async function reconcile(calls: Calls, of: Kept, subject: string, hint: string): Promise<string> {
  const { row: found } = own(await readState(pool), of.name, subject);
  if (!found) return "nothing to reconcile";
  if (calls.chance(0.8)) await pool.query(calls.pick(damages), [found.id]);
  const before = await readState(pool);
  const { row, lines, holds, grants } = own(before, of.name, subject);
  const definition = of.definition(Date.now());
  const bucket = { quota: of.name, subject, limit: of.limit };
  const ledger = new QuotaLedger(row as BucketRow, definition.rule);
  for (const line of lines) ledger.add(line);
  const checked = ledger.checked({
    held: holds.reduce((sum, { amount }) => sum + amount, 0),
    credit: grants.reduce((sum, { amount, spent }) => sum + (amount - spent), 0),
  });
  const { findings, entries } = checked;
  for (const store of [functions, generic])
    expect(await store.upkeep.reconcile(pinned.connection, definition, bucket, undefined, how), hint).toEqual(
      {
        findings,
        entries,
        repaired: false,
      },
    );
  const trust = row?.parts || definition.rule.window === "log" || calls.chance(0.6) ? "ledger" : "levels";
  const id = `repair-${calls.next()}`;
  const answer = await functions.upkeep.reconcile(pinned.connection, definition, bucket, { id, trust }, how);
  expect(answer, hint).toEqual({ findings, entries, repaired: findings.length > 0 });
  const after = await readState(pool);
  if (findings.length === 0) expect(after, hint).toEqual(before);
  else {
    const now = own(after, of.name, subject).lines.at(-1)?.at as number;
    const { rule } = definition;
    const counted = rule.window === "log" ? counts(lines.toReversed(), rule.per, now) : 0;
    const writes = repair(row as BucketRow, checked, { id, trust, now, counted }, definition, of.limit);
    expect(after, hint).toEqual(applied(before, writes as never));
  }
  return findings.length > 0 ? "repaired" : "in order";
}

/** Sums by kind are as exact as a number can be. */
function exact(state: State): unknown {
  return JSON.parse(
    JSON.stringify(state, (_, value: unknown) =>
      typeof value === "number" && value > Number.MAX_SAFE_INTEGER ? "large" : value,
    ),
  ) as unknown;
}

/** The function, and the same by the generic store in a transaction that is undone. */
async function rollUp(calls: Calls, of: Kept, hint: string): Promise<string> {
  const what = {
    before: Date.now() - calls.pick([0, 0, 5000, 100_000]),
    ageMs: 0,
    from: undefined,
    most: calls.pick([3, 10, 2000]),
  };
  const { native, connection } = pinned;
  await native.query("BEGIN");
  const expected = await generic.upkeep.rollUp(connection, of.name, what, { ...how, free: false });
  const wanted = await readState(native);
  await native.query("ROLLBACK");
  const before = await readState(pool);
  const answer = await functions.upkeep.rollUp(connection, of.name, what, how);
  expect(answer, hint).toEqual(expected);
  expect(exact(await readState(pool)), hint).toEqual(exact(wanted));
  // What was a line is one now, or is counted.
  for (const subject of subjects) {
    const ledger = own(wanted, of.name, subject);
    const sum = (lines: readonly { kind: string }[]) => lines.filter(({ kind }) => kind !== "rollup").length;
    expect(sum(ledger.lines), hint).toBeLessThanOrEqual(sum(own(before, of.name, subject).lines));
  }
  return answer.gone > 0 ? "rolled up" : "nothing to roll up";
}

async function lists(of: Kept, subject: string, hint: string): Promise<void> {
  const { connection } = pinned;
  const bucket = { quota: of.name, subject };
  for (const ask of [
    (store: Quotas<SqlConnection>) => store.lists.names(connection, how),
    (store: Quotas<SqlConnection>) =>
      store.lists.subjects(connection, of.name, { after: "ada", most: 10, of: undefined }, how),
    (store: Quotas<SqlConnection>) =>
      store.lists.subjects(connection, of.name, { after: undefined, most: 10, of: [subject] }, how),
    (store: Quotas<SqlConnection>) => store.lists.grants(connection, bucket, how),
    (store: Quotas<SqlConnection>) => store.lists.entries(connection, bucket, { below: 20, most: 10 }, how),
  ])
    expect(await ask(generic), hint).toEqual(await ask(functions));
}

const tables = "holdfast.quota_bucket, holdfast.quota_line, holdfast.quota_hold, holdfast.quota_grant";

describe("the functions and the decision come to the same", () => {
  const happened = new Set<string>();

  const play = async (seed: number): Promise<void> => {
    // A few of them, so that much happens to each: three seeds in a row have all.
    const calls = new Calls(
      seed,
      quotas.filter((_, place) => place % 3 === seed % 3),
    );
    await pool.query(`TRUNCATE ${tables}`);
    for (let step = 0; step < steps; step++) {
      const hint = `HOLDFAST_SEED=${seed} step ${step}`;
      const of = calls.pick(calls.quotas);
      const subject = calls.pick(subjects);
      if (calls.chance(0.25)) await age(of.name, subject, of.unit * calls.pick([1, 1, 2, 5]));
      const what = calls.next();
      if (what < 0.5) {
        const batch = calls.batch(Date.now());
        for (const kind of await consume(batch, `${hint}: ${JSON.stringify(batch)}`)) happened.add(kind);
      } else if (what < 0.86) {
        const { lines, holds, grants } = own(await readState(pool), of.name, subject);
        const ids = (rows: readonly { id: string }[]) => rows.map(({ id }) => id);
        const drained = ids(lines.filter(({ drains }) => drains));
        const known = { lines: ids(lines), drained, holds: ids(holds), grants: ids(grants) };
        const amendment = calls.amendment(Date.now(), known, of, subject);
        happened.add(await amend(amendment, `${hint}: ${JSON.stringify(amendment)}`));
      } else if (what < 0.9) await peek(calls, of, subject, hint);
      else if (what < 0.94)
        happened.add(await reconcile(calls, of, subject, `${hint}: reconcile ${of.name}`));
      else if (what < 0.97) happened.add(await rollUp(calls, of, `${hint}: roll up ${of.name}`));
      else await lists(of, subject, hint);
    }
  };

  test.for(Array.from({ length: seeds }, (_, i) => i))(
    "seed + %i",
    { timeout: 240_000 },
    async (i, { skip }) => {
      skip(why !== undefined, why);
      await play(inject("seed") + i);
    },
  );

  test("all of it happened, or it was not shown", { timeout: 240_000 }, async ({ skip }) => {
    skip(why !== undefined, why);
    const wanted = [
      "granted,refused,before,conflict",
      "refund done,refund unknown,refund too much",
      "settle done,settle unknown,settle refused,release done,release unknown",
      "grant done,revoke done,limit done,plan done,reset done",
      "repaired,rolled up",
    ].flatMap((each) => each.split(","));
    const missing = () => wanted.filter((kind) => !happened.has(kind));
    // Chance may have left something out: a few seeds more, then it cannot be chance.
    for (let more = seeds; more < seeds + 12 && missing().length > 0; more++)
      await play(inject("seed") + more);
    expect(missing()).toEqual([]);
  });
});
