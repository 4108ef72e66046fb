import type { Row, SqlConnection } from "../../../seam/database.ts";
import { SchemaMissingError } from "../../../seam/errors.ts";
import { type Statement, own, sql } from "../../../seam/sql.ts";
import type { How } from "../../../seam/store.ts";
import type {
  Amendment,
  Amended,
  UseBatch,
  Bucket,
  Definition,
  Elsewhere,
  QuotaEntry,
  Late,
  QuotaLists,
  QuotaUpkeep,
  Quotas,
  BucketStanding,
  Use,
  UseVerdict,
  Verdicts,
} from "../../../quota/store.ts";
import { failureOf } from "../locks/index.ts";
import { quotaMoves } from "../../sql/quota/moves.ts";
import { QuotaRows } from "../../sql/quota/rows.ts";
import { impatient, patiently } from "../patience.ts";
import { byPrimary } from "../primary.ts";
import { storeDialect } from "../store-dialect.ts";
import { isTrue } from "../probe.ts";
import { safely } from "../search-path.ts";
import { unlimited } from "./limits.ts";
import { list, momentOf, numbers, texts } from "../values.ts";

function definitionJson({ rule, plans, over }: Definition): string {
  // JSON has no Infinity: it would be null, which is no plan.
  return JSON.stringify({ ...rule, plans, over }, (_, value: unknown) =>
    value === Infinity ? Number(unlimited) : value,
  );
}

const definitionsJson = (definitions: readonly Definition[]) => `[${definitions.map(definitionJson).join()}]`;

const finite = (amount: number | undefined): string | null =>
  amount === undefined ? null : amount === Infinity ? unlimited : String(amount);

const orInfinity = (amount: unknown): number =>
  Number(amount) === Number(unlimited) ? Infinity : Number(amount);

const verdictKinds = ["refused", "granted", "before", "conflict"] as const;

/** Calls of one function: their names are written in full. */
async function ask(connection: SqlConnection, statement: Statement): Promise<readonly Row[]> {
  const asking = connection.prepared?.(statement) ?? connection.query(statement);
  return answered(
    connection,
    asking.then(({ rows }) => rows),
  );
}

/** What compares and computes by itself. */
const askSafely = (connection: SqlConnection, statement: Statement) =>
  answered(connection, safely(connection, statement));

async function answered(connection: SqlConnection, asking: Promise<readonly Row[]>): Promise<readonly Row[]> {
  return asking.catch((error: unknown) => {
    throw failureOf(connection, error) === "schema-missing"
      ? new SchemaMissingError("A table or function of quotas", error)
      : error;
  });
}

function standing(row: Record<string, unknown> | undefined): BucketStanding {
  return {
    used: Number(row?.["used"]),
    held: Number(row?.["held"]),
    credit: Number(row?.["credit"]),
    limit: row?.["max"] === null ? undefined : orInfinity(row?.["max"]),
    version: Number(row?.["version"]),
    at: Number(row?.["at"]),
  };
}

/** A bucket that does not count on another of several databases. */
const here = sql.raw("b.moved_to IS NULL AND b.moved_from IS NULL");

const lists: QuotaLists<SqlConnection> = {
  async names(connection) {
    // From one name to the next, by the index: buckets are many, quotas are few.
    const rows = await askSafely(
      connection,
      sql`WITH RECURSIVE names (name) AS (
    (SELECT b.quota FROM ${own("quota_bucket")} b ORDER BY b.quota LIMIT 1)
    UNION ALL SELECT (SELECT b.quota FROM ${own("quota_bucket")} b WHERE b.quota > n.name ORDER BY b.quota LIMIT 1)
    FROM names n WHERE n.name IS NOT NULL)
  SELECT n.name, (SELECT pg_catalog.count(*) FROM (SELECT FROM ${own("quota_bucket")} b WHERE b.quota = n.name AND ${here} LIMIT 100000) x)::pg_catalog.text AS subjects
  FROM names n WHERE n.name IS NOT NULL`,
    );
    return rows
      .map((row) => ({ name: String(row["name"]), subjects: Number(row["subjects"]) }))
      .filter(({ subjects }) => subjects > 0);
  },

  async subjects(connection, quota, { after, most, of }) {
    const which = of
      ? sql`b.subject = ANY (${texts(of, (subject) => subject)}::pg_catalog.text::pg_catalog.text[])`
      : sql`b.subject > ${after ?? ""}::pg_catalog.text`;
    const rows = await askSafely(
      connection,
      sql`SELECT b.subject, b.used, b.held, b.credit, b.own_limit AS max, b.plan, b.version,
  (extract(epoch FROM b.since) * 1000)::pg_catalog.float8 AS since, pg_catalog.cardinality(b.parts) - 1 AS parts FROM ${own("quota_bucket")} b
  WHERE b.quota = ${quota}::pg_catalog.text AND ${which} AND ${here} ORDER BY b.subject LIMIT ${String(most)}::pg_catalog.text::int`,
    );
    return rows.map((row) => {
      const { at: _, ...stands } = standing(row);
      return {
        ...stands,
        subject: String(row["subject"]),
        plan: typeof row["plan"] === "string" ? row["plan"] : undefined,
        since: row["since"] === null ? undefined : Number(row["since"]),
        parts: row["parts"] === null ? undefined : Number(row["parts"]),
      };
    });
  },

  async grants(connection, { quota, subject }) {
    const rows = await askSafely(
      connection,
      sql`SELECT g.id, g.amount, g.spent, g.priority, CASE WHEN g.until < 'infinity' THEN (extract(epoch FROM g.until) * 1000)::pg_catalog.float8 END AS until,
  g.until <= pg_catalog.clock_timestamp() AS gone, (extract(epoch FROM l.at) * 1000)::pg_catalog.float8 AS at FROM ${own("quota_grant")} g
  LEFT JOIN ${own("quota_line")} l ON l.bucket = ${numberOf({ quota, subject })} AND l.id = g.id
  WHERE g.quota = ${quota}::pg_catalog.text AND g.subject = ${subject}::pg_catalog.text AND EXISTS ${numberOf({ quota, subject })} ORDER BY g.priority, g.until, g.id`,
    );
    return rows.map((row) => ({
      id: String(row["id"]),
      amount: Number(row["amount"]),
      spent: Number(row["spent"]),
      priority: Number(row["priority"]),
      until: row["until"] === null ? undefined : Number(row["until"]),
      over: isTrue(row["gone"]),
      at: row["at"] === null ? undefined : Number(row["at"]),
    }));
  },

  async entries(connection, { quota, subject }, { below, most }) {
    const rows = await askSafely(
      connection,
      sql`SELECT version, kind, id, entry, amount, coalesce(delta, amount) AS delta, coalesce(forgotten, 0) AS forgotten,
  coalesce(refunded, 0) AS refunded, used, coalesce(held, 0) AS held, coalesce(credit, 0) AS credit, max,
  coalesce(first, version) AS first, (extract(epoch FROM at) * 1000)::pg_catalog.float8 AS at, details::pg_catalog.text AS details
  FROM ${own("quota_line")}
  WHERE bucket = ${numberOf({ quota, subject })} AND version < ${below === undefined ? "9223372036854775807" : String(below)}::pg_catalog.text::bigint
  ORDER BY version DESC LIMIT ${String(most)}::pg_catalog.text::int`,
    );
    return rows.map((row): QuotaEntry => ({
      ...standing(row),
      kind: String(row["kind"]),
      id: String(row["id"]),
      of: typeof row["entry"] === "string" ? row["entry"] : undefined,
      amount: orInfinity(row["amount"]),
      delta: Number(row["delta"]),
      first: Number(row["first"]),
      forgotten: Number(row["forgotten"]),
      refunded: Number(row["refunded"]),
      details:
        typeof row["details"] === "string"
          ? (JSON.parse(row["details"]) as Record<string, unknown>)
          : undefined,
    }));
  },
};

const upkeep: QuotaUpkeep<SqlConnection> = {
  async reconcile(connection, definition, bucket, repair) {
    const [row] = await ask(
      connection,
      sql`SELECT at, late, pg_catalog.to_json(findings)::pg_catalog.text AS findings, entries, repaired
  FROM ${own("quota_mend")}(${byPrimary(sql`${definitionJson(definition)}::pg_catalog.text::pg_catalog.jsonb`)}, ${bucket.quota}::pg_catalog.text, ${bucket.subject}::pg_catalog.text,
  ${finite(bucket.limit)}::pg_catalog.text::bigint, ${repair?.id ?? null}::pg_catalog.text, ${repair?.trust ?? "ledger"}::pg_catalog.text)`,
    );
    if (isTrue(row?.["late"])) return { late: Number(row?.["at"]) };
    if (Number(row?.["entries"]) === -1) return { elsewhere: true };
    return {
      findings: JSON.parse(String(row?.["findings"])) as string[],
      entries: Number(row?.["entries"]),
      repaired: isTrue(row?.["repaired"]),
    };
  },

  async rollUp(connection, quota, { before, ageMs, from, most }) {
    const [row] = await askSafely(
      connection,
      sql`SELECT r.gone, r.next, pg_catalog.to_json(r.broken)::pg_catalog.text AS broken, (extract(epoch FROM c.before) * 1000)::pg_catalog.float8 AS before
  FROM (SELECT least(${momentOf(before)}, pg_catalog.clock_timestamp() - ${String(ageMs)}::pg_catalog.text::pg_catalog.float8 * interval '1 millisecond') AS before OFFSET 0) c,
  LATERAL ${own("quota_roll_up")}(${quota}::pg_catalog.text, ${from ?? null}::pg_catalog.text, c.before, ${String(most)}::pg_catalog.text::int) r`,
    );
    return {
      before: Number(row?.["before"]),
      gone: Number(row?.["gone"]),
      next: typeof row?.["next"] === "string" ? row["next"] : undefined,
      broken: JSON.parse(String(row?.["broken"])) as string[],
    };
  },
};

export const quotas: Quotas<SqlConnection> = {
  async consume(connection, batch: UseBatch, { waitMs }: How): Promise<Verdicts> {
    const again = repeats(batch.uses);
    const plain = plainly(batch, again);
    if (!plain) return decide(connection, batch, waitMs, again);
    const use = batch.uses.length === 1 ? useOne : useMany;
    return use(connection, batch, waitMs, plain);
  },

  async amend(connection, amendment: Amendment, { waitMs }: How): Promise<Amended | Elsewhere | Late> {
    const { definition, bucket, id, details, kind } = amendment;
    const of = "of" in amendment ? amendment.of : null;
    const amount = "amount" in amendment ? finite(amendment.amount) : null;
    const more =
      kind === "grant"
        ? { priority: amendment.priority, until: amendment.until }
        : kind === "plan"
          ? { plan: amendment.plan }
          : {};
    const [row] = await ask(
      connection,
      sql`SELECT f.*${impatient(waitMs)} FROM ${own("quota_amend")}(${patiently(waitMs, sql`${definitionJson(definition)}::pg_catalog.text::pg_catalog.jsonb`)}, ${kind}::pg_catalog.text,
  ${bucket.quota}::pg_catalog.text, ${bucket.subject}::pg_catalog.text, ${bucket.limit === undefined ? null : String(bucket.limit)}::pg_catalog.text::bigint,
  ${id}::pg_catalog.text, ${of}::pg_catalog.text, ${amount}::pg_catalog.text::bigint,
  ${JSON.stringify(more)}::pg_catalog.text::pg_catalog.jsonb, ${details ?? null}::pg_catalog.text) f`,
    );
    if (Number(row?.["verdict"]) === -1) return { late: Number(row?.["at"]) };
    if (Number(row?.["verdict"]) === -2) return { elsewhere: true };
    const kinds = ["refused", "done", "before", "conflict", "unknown", "too much"] as const;
    return {
      ...standing(row),
      kind: kinds[Number(row?.["verdict"])] as Amended["kind"],
      amount: Number(row?.["amount"]),
    };
  },

  async peek(connection, definition, bucket) {
    const [row] = await ask(
      connection,
      sql`SELECT * FROM ${own("quota_peek")}(${byPrimary(sql`${definitionJson(definition)}::pg_catalog.text::pg_catalog.jsonb`)},
  ${bucket.quota}::pg_catalog.text, ${bucket.subject}::pg_catalog.text, ${bucket.limit === undefined ? null : String(bucket.limit)}::pg_catalog.text::bigint)`,
    );
    if (Number(row?.["version"]) === -1) return { late: Number(row?.["at"]) };
    if (Number(row?.["version"]) === -2) return { elsewhere: true };
    return { ...standing(row), plan: typeof row?.["plan"] === "string" ? row["plan"] : undefined };
  },

  lists,
  upkeep,
  moves: quotaMoves(new QuotaRows(storeDialect)),
};

const numberOf = ({ quota, subject }: Pick<Bucket, "quota" | "subject">) =>
  sql`(SELECT b.id FROM ${own("quota_bucket")} b WHERE b.quota = ${quota}::pg_catalog.text AND b.subject = ${subject}::pg_catalog.text AND ${here})`;

const rulesOf = (definitions: readonly Definition[], waitMs: number) =>
  patiently(waitMs, sql`${definitionsJson(definitions)}::pg_catalog.text::pg_catalog.jsonb`);

async function useOne(
  connection: SqlConnection,
  { definitions, buckets, uses, make, look }: UseBatch,
  waitMs: number,
  { opens, ends, over }: Plain,
): Promise<Verdicts> {
  const { quota, subject, limit } = buckets[0] as Bucket;
  const { id, amount, details } = uses[0] as Use;
  const [row] = await ask(
    connection,
    sql`SELECT f.*${impatient(waitMs)} FROM ${own("quota_use")}(${rulesOf(definitions, waitMs)},
  ${momentOf(opens)}, ${momentOf(ends)}, ${over === undefined ? null : String(over)}::pg_catalog.text::bigint,
  ${String(make)}::pg_catalog.text::boolean, ${String(look)}::pg_catalog.text::boolean, ${quota}::pg_catalog.text, ${subject}::pg_catalog.text,
  ${limit === undefined ? null : String(limit)}::pg_catalog.text::bigint, ${id}::pg_catalog.text, ${String(amount)}::pg_catalog.text::bigint, ${details ?? null}::pg_catalog.text) f`,
  );
  const at = Number(row?.["at"]);
  if (isTrue(row?.["missing"])) return { missing: true, at, elsewhere: Number(row?.["verdict"] ?? 0) === -1 };
  const retry = row?.["retry"] === null ? undefined : Number(row?.["retry"]);
  const kind = verdictKinds[Number(row?.["verdict"])] as UseVerdict["kind"];
  const verdict = { ...standing(row), at: Number(row?.["entered"]), kind, retry: retryOf(retry) };
  return { missing: false, at, verdicts: [verdict] };
}

async function useMany(
  connection: SqlConnection,
  { definitions, buckets, uses, make, look }: UseBatch,
  waitMs: number,
  { opens, ends, over }: Plain,
): Promise<Verdicts> {
  const totals = buckets.map(() => 0);
  const counts = buckets.map(() => 0);
  const sums: number[] = [];
  const nths: number[] = [];
  for (const { bucket, amount } of uses) {
    sums.push((totals[bucket] = (totals[bucket] as number) + amount));
    nths.push((counts[bucket] = (counts[bucket] as number) + 1));
  }
  const noted = uses.some(({ details }) => details !== undefined);
  const [row] = await ask(
    connection,
    sql`SELECT fast, ${columns}${impatient(waitMs)} FROM ${own("quota_batch")}(${rulesOf(definitions, waitMs)},
  ${momentOf(opens)}, ${momentOf(ends)}, ${over === undefined ? null : String(over)}::pg_catalog.text::bigint,
  ${String(make)}::pg_catalog.text::boolean, ${String(look)}::pg_catalog.text::boolean, ${buckets[0]?.quota}::pg_catalog.text,
  ${texts(buckets, ({ subject }) => subject)}::pg_catalog.text::pg_catalog.text[], ${list(buckets.map(({ limit }) => limit))}::pg_catalog.text::bigint[],
  ${list(totals)}::pg_catalog.text::bigint[], ${list(counts)}::pg_catalog.text::bigint[],
  ${list(uses.map(({ bucket }) => bucket + 1))}::pg_catalog.text::int[], ${texts(uses, ({ id }) => id)}::pg_catalog.text::pg_catalog.text[],
  ${list(uses.map(({ amount }) => amount))}::pg_catalog.text::bigint[], ${list(sums)}::pg_catalog.text::bigint[], ${list(nths)}::pg_catalog.text::bigint[],
  ${noted ? texts(uses, ({ details }) => details) : null}::pg_catalog.text::pg_catalog.text[])`,
  );
  const at = Number(row?.["at"]);
  if (isTrue(row?.["missing"])) return { missing: true, at, elsewhere: numbers(row?.["verdicts"])[0] === -1 };
  if (!isTrue(row?.["fast"])) return { missing: false, at, verdicts: verdictsOf(row, uses.length, at) };
  const before = verdictsOf(row, buckets.length, at);
  const verdicts = uses.map(({ bucket }, i): UseVerdict => {
    const was = before[bucket] as UseVerdict;
    return {
      ...was,
      kind: "granted",
      used: was.used + (sums[i] as number),
      version: was.version + (nths[i] as number),
    };
  });
  return { missing: false, at, verdicts };
}

async function decide(
  connection: SqlConnection,
  { definitions, buckets, uses, make, look }: UseBatch,
  waitMs: number,
  again: readonly number[],
): Promise<Verdicts> {
  const [row] = await ask(
    connection,
    sql`SELECT ${columns}${impatient(waitMs)} FROM ${own("quota_decide")}(${rulesOf(definitions, waitMs)},
  ${String(make)}::pg_catalog.text::boolean, ${String(look)}::pg_catalog.text::boolean, ${texts(buckets, ({ quota }) => quota)}::pg_catalog.text::pg_catalog.text[],
  ${texts(buckets, ({ subject }) => subject)}::pg_catalog.text::pg_catalog.text[],
  ${list(buckets.map(({ definition }) => definition + 1))}::pg_catalog.text::int[],
  ${list(buckets.map(({ limit }) => limit))}::pg_catalog.text::bigint[],
  ${list(uses.map(({ bucket }) => bucket + 1))}::pg_catalog.text::int[], ${texts(uses, ({ id }) => id)}::pg_catalog.text::pg_catalog.text[],
  ${list(uses.map(({ amount }) => amount))}::pg_catalog.text::bigint[], ${list(uses.map(({ group }) => group))}::pg_catalog.text::int[],
  ${list(uses.map(({ holdMs }) => holdMs))}::pg_catalog.text::bigint[], ${texts(uses, ({ details }) => details)}::pg_catalog.text::pg_catalog.text[],
  ${list(again)}::pg_catalog.text::int[])`,
  );
  const at = Number(row?.["at"]);
  if (isTrue(row?.["missing"])) return { missing: true, at, elsewhere: numbers(row?.["verdicts"])[0] === -1 };
  return { missing: false, at, verdicts: verdictsOf(row, uses.length, at) };
}

const columns = sql.raw(
  "missing, at, verdicts::pg_catalog.text, useds::pg_catalog.text, helds::pg_catalog.text, credits::pg_catalog.text, maxes::pg_catalog.text, versions::pg_catalog.text, ats::pg_catalog.text, retries::pg_catalog.text",
);

function verdictsOf(row: Record<string, unknown> | undefined, count: number, at: number): UseVerdict[] {
  const [kinds, useds, helds, credits, maxes, versions, ats, retries] = [
    "verdicts",
    "useds",
    "helds",
    "credits",
    "maxes",
    "versions",
    "ats",
    "retries",
  ].map((name) => numbers(row?.[name]));
  return Array.from({ length: count }, (_, i): UseVerdict => ({
    kind: verdictKinds[kinds?.[i] ?? 0] as UseVerdict["kind"],
    used: useds?.[i] ?? 0,
    held: helds?.[i] ?? 0,
    credit: credits?.[i] ?? 0,
    limit: maxes?.[i],
    version: versions?.[i] ?? 0,
    at: ats?.[i] ?? at,
    retry: retryOf(retries?.[i]),
  }));
}

const retryOf = (retry: number | undefined): UseVerdict["retry"] =>
  retry === -1 ? "window" : retry === -2 ? "never" : retry;

interface Plain {
  readonly opens: number | undefined;
  readonly ends: number | undefined;
  readonly over: number | undefined;
}

/** Uses of one quota, each by itself and with an id of its own, in a window of the usual kind. */
function plainly(
  { definitions, uses }: Pick<UseBatch, "definitions" | "uses">,
  again: readonly number[],
): Plain | undefined {
  const [definition, ...others] = definitions;
  if (!definition || others.length > 0 || again.some((before) => before > 0)) return undefined;
  const { rule, over } = definition;
  if (rule.window !== "none" && rule.window !== "fixed") return undefined;
  if (uses.some(({ holdMs, group }, i) => holdMs !== undefined || group === uses[i - 1]?.group))
    return undefined;
  const [, opens, ends] = rule.window === "fixed" ? rule.starts : [];
  return { opens, ends, over };
}

/** For each, the last one before it of the same bucket and id, counted from 1: any of them may be the one that was granted. */
function repeats(uses: UseBatch["uses"]): number[] {
  const last = new Map<string, number>();
  return uses.map(({ bucket, id }, i) => {
    const name = `${bucket}:${id}`;
    const before = last.get(name) ?? 0;
    last.set(name, i + 1);
    return before;
  });
}
