import type { SqlConnection } from "../../core/database.ts";
import { SchemaMissingError } from "../../core/errors.ts";
import { type Statement, sql } from "../../core/sql.ts";
import type {
  Amendment,
  Amended,
  Batch,
  Bucket,
  Definition,
  Entry,
  Late,
  Quotas,
  Standing,
  Use,
  Verdict,
  Verdicts,
} from "../../core/quotas.ts";
import { failureOf } from "./locks.ts";

/** As text, which every client sends the same way. */
function list(values: readonly (string | number | undefined)[]): string {
  return `{${values.map((value) => (value === undefined ? "NULL" : typeof value === "number" ? value : quoted(value))).join(",")}}`;
}

const quoted = (text: string) => `"${text.replace(/["\\]/g, "\\$&")}"`;

function definitionJson({ rule, plans, over }: Definition): object {
  return { ...rule, plans, over };
}

const verdictKinds = ["refused", "granted", "before", "conflict"] as const;

function numbers(value: unknown): (number | undefined)[] {
  const text = String(value);
  if (text === "{}" || value === null) return [];
  return text
    .slice(1, -1)
    .split(",")
    .map((each) => (each === "NULL" ? undefined : Number(each)));
}

async function ask(connection: SqlConnection, statement: Statement): Promise<Record<string, unknown>[]> {
  const { rows } = await connection.query(statement).catch((error: unknown) => {
    throw failureOf(connection, error) === "schema-missing"
      ? new SchemaMissingError("A table or function of quotas", error)
      : error;
  });
  return rows as Record<string, unknown>[];
}

function standing(row: Record<string, unknown> | undefined): Standing {
  return {
    used: Number(row?.["used"]),
    held: Number(row?.["held"]),
    credit: Number(row?.["credit"]),
    limit: row?.["max"] === null ? undefined : Number(row?.["max"]),
    version: Number(row?.["version"]),
    at: Number(row?.["at"]),
  };
}

export const quotas: Quotas<SqlConnection> = {
  async consume(connection, { definitions, buckets, uses, make, look }: Batch): Promise<Verdicts> {
    const again = repeats(uses);
    const plain = plainly({ definitions, uses }, again);
    const [first, ...rest] = uses;
    if (plain && first && rest.length === 0)
      return useOne(connection, { definitions, buckets, make, look }, first, plain);
    const bucketOf = (use: Batch["uses"][number]) => buckets[use.bucket] as Bucket;
    const [row] = await ask(
      connection,
      sql`SELECT missing, at, verdicts::text, useds::text, helds::text, credits::text, maxes::text, versions::text,
  ats::text, retries::text FROM holdfast.quota_consume(${JSON.stringify(definitions.map(definitionJson))}::text::jsonb,
  ${sql.raw(String(plain !== undefined))}, ${moment(plain?.opens)}, ${moment(plain?.ends)},
  ${plain?.over === undefined ? null : String(plain.over)}::text::bigint, ${sql.raw(String(make))}, ${sql.raw(String(look))}, ${list(buckets.map(({ quota }) => quota))}::text::text[],
  ${list(buckets.map(({ subject }) => subject))}::text::text[],
  ${list(buckets.map(({ definition }) => definition + 1))}::text::int[],
  ${list(buckets.map(({ limit }) => limit))}::text::bigint[],
  ${list(uses.map(({ bucket }) => bucket + 1))}::text::int[],
  ${list(uses.map((use) => bucketOf(use).quota))}::text::text[],
  ${list(uses.map((use) => bucketOf(use).subject))}::text::text[],
  ${list(uses.map(({ id }) => id))}::text::text[],
  ${list(uses.map(({ amount }) => amount))}::text::bigint[],
  ${list(uses.map(({ group }) => group))}::text::int[],
  ${list(uses.map(({ holdMs }) => holdMs))}::text::bigint[],
  ${list(uses.map(({ details }) => details))}::text::text[],
  ${list(again)}::text::int[])`,
    );
    const at = Number(row?.["at"]);
    if (row?.["missing"] === true || row?.["missing"] === "t") return { missing: true, at };
    const kinds = numbers(row?.["verdicts"]);
    const column = Object.fromEntries(
      ["useds", "helds", "credits", "maxes", "versions", "ats", "retries"].map((name) => [
        name,
        numbers(row?.[name]),
      ]),
    ) as Record<string, (number | undefined)[]>;
    const verdicts = uses.map((_, i): Verdict => {
      const retry = column["retries"]?.[i];
      return {
        kind: verdictKinds[kinds[i] ?? 0] as Verdict["kind"],
        used: column["useds"]?.[i] ?? 0,
        held: column["helds"]?.[i] ?? 0,
        credit: column["credits"]?.[i] ?? 0,
        limit: column["maxes"]?.[i],
        version: column["versions"]?.[i] ?? 0,
        at: column["ats"]?.[i] ?? at,
        retry: retryOf(retry),
      };
    });
    return { missing: false, at, verdicts };
  },

  async amend(connection, amendment: Amendment): Promise<Amended | Late> {
    const { definition, bucket, id, details, kind } = amendment;
    const of = "of" in amendment ? amendment.of : null;
    const amount = "amount" in amendment ? (amendment.amount ?? null) : null;
    const more =
      kind === "grant"
        ? { priority: amendment.priority, until: amendment.until }
        : kind === "plan"
          ? { plan: amendment.plan }
          : {};
    const [row] = await ask(
      connection,
      sql`SELECT * FROM holdfast.quota_amend(${JSON.stringify(definitionJson(definition))}::text::jsonb, ${kind}::text,
  ${bucket.quota}::text, ${bucket.subject}::text, ${bucket.limit === undefined ? null : String(bucket.limit)}::text::bigint,
  ${id}::text, ${of}::text, ${amount === null ? null : String(amount)}::text::bigint,
  ${JSON.stringify(more)}::text::jsonb, ${details ?? null}::text)`,
    );
    if (Number(row?.["verdict"]) === -1) return { late: Number(row?.["at"]) };
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
      sql`SELECT * FROM holdfast.quota_peek(${JSON.stringify(definitionJson(definition))}::text::jsonb,
  ${bucket.quota}::text, ${bucket.subject}::text, ${bucket.limit === undefined ? null : String(bucket.limit)}::text::bigint)`,
    );
    if (Number(row?.["version"]) === -1) return { late: Number(row?.["at"]) };
    return { ...standing(row), plan: typeof row?.["plan"] === "string" ? row["plan"] : undefined };
  },

  async entries(connection, { quota, subject }, below, most) {
    const rows = await ask(
      connection,
      sql`SELECT version, kind, id, entry, amount, delta, forgotten, refunded, used, held, credit, max,
  (extract(epoch FROM at) * 1000)::float8 AS at, details::text AS details FROM holdfast.quota_entry
  WHERE quota = ${quota}::text AND subject = ${subject}::text
    AND version < ${below === undefined ? "9223372036854775807" : String(below)}::text::bigint
  ORDER BY version DESC LIMIT ${String(most)}::text::int`,
    );
    return rows.map((row): Entry => ({
      ...standing(row),
      kind: String(row["kind"]),
      id: String(row["id"]),
      of: typeof row["entry"] === "string" ? row["entry"] : undefined,
      amount: Number(row["amount"]),
      delta: Number(row["delta"]),
      forgotten: Number(row["forgotten"]),
      refunded: Number(row["refunded"]),
      details:
        typeof row["details"] === "string"
          ? (JSON.parse(row["details"]) as Record<string, unknown>)
          : undefined,
    }));
  },

  async forget(connection, quota, before, most) {
    const [row] = await ask(
      connection,
      sql`WITH gone AS (DELETE FROM holdfast.quota_entry WHERE (quota, subject, version) IN (
    SELECT e.quota, e.subject, e.version FROM holdfast.quota_entry e JOIN holdfast.quota_bucket b USING (quota, subject)
    WHERE e.quota = ${quota}::text AND e.at < to_timestamp(${String(before)}::text::float8 / 1000) AND e.version < b.version
    LIMIT ${String(most)}::text::int) RETURNING 1) SELECT count(*)::int AS n FROM gone`,
    );
    return Number(row?.["n"]);
  },
};

async function useOne(
  connection: SqlConnection,
  { definitions, buckets, make, look }: Omit<Batch, "uses">,
  { id, amount, details }: Use,
  { opens, ends, over }: Plain,
): Promise<Verdicts> {
  const { quota, subject, limit } = buckets[0] as Bucket;
  const [row] = await ask(
    connection,
    sql`SELECT * FROM holdfast.quota_use(${JSON.stringify(definitions.map(definitionJson))}::text::jsonb,
  ${moment(opens)}, ${moment(ends)}, ${over === undefined ? null : String(over)}::text::bigint,
  ${sql.raw(String(make))}, ${sql.raw(String(look))}, ${quota}::text, ${subject}::text,
  ${limit === undefined ? null : String(limit)}::text::bigint, ${id}::text, ${String(amount)}::text::bigint, ${details ?? null}::text)`,
  );
  const at = Number(row?.["at"]);
  if (row?.["missing"] === true || row?.["missing"] === "t") return { missing: true, at };
  const retry = row?.["retry"] === null ? undefined : Number(row?.["retry"]);
  const kind = verdictKinds[Number(row?.["verdict"])] as Verdict["kind"];
  const verdict = { ...standing(row), at: Number(row?.["entered"]), kind, retry: retryOf(retry) };
  return { missing: false, at, verdicts: [verdict] };
}

const retryOf = (retry: number | undefined): Verdict["retry"] =>
  retry === -1 ? "window" : retry === -2 ? "never" : retry;

const moment = (ms: number | undefined) =>
  sql`to_timestamp(${ms === undefined ? null : String(ms)}::text::float8 / 1000)`;

interface Plain {
  readonly opens: number | undefined;
  readonly ends: number | undefined;
  readonly over: number | undefined;
}

/** Uses of one quota, each by itself and with an id of its own, in a window of the usual kind. */
function plainly(
  { definitions, uses }: Pick<Batch, "definitions" | "uses">,
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

/** For each, the earlier one of the same bucket and id, counted from 1. */
function repeats(uses: Batch["uses"]): number[] {
  const first = new Map<string, number>();
  return uses.map(({ bucket, id }, i) => {
    const name = `${bucket}:${id}`;
    const before = first.get(name);
    if (before === undefined) first.set(name, i + 1);
    return before ?? 0;
  });
}
