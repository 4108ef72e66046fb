import { type Row, type Server, type Session, safePath, schemaIn } from "../../server.ts";
import { within } from "../../within.ts";
import { answerMs, lazy, lockMs, sessionWithin, statementMs, checkMs } from "../bounded.ts";
import { type Finding, blind, noConnection } from "../check.ts";
import type { Patient } from "../patient.ts";

export interface Setting {
  readonly name: string;
  readonly value: string;
  readonly unit: string;
  readonly source: string;
}

export type Pooling = "none" | "transaction" | "statement";

export interface Me {
  readonly role: string;
  readonly database: string;
  /** Of version(): what look-alikes say of themselves. */
  readonly version: string;
  readonly number: number;
  readonly standby: boolean;
  /** May see what sessions of others do. */
  readonly monitor: boolean;
}

export interface PostgresPatient extends Patient {
  readonly me: Me;
  readonly settings: () => Promise<ReadonlyMap<string, Setting>>;
  readonly pooling: () => Promise<Pooling>;
}

/** Of this transaction only: through a pooler, what a session sets stays for the next client. */
const bounds = `SET LOCAL statement_timeout = ${statementMs}; SET LOCAL lock_timeout = ${lockMs}; ${safePath}`;
const begin = `BEGIN READ ONLY; ${bounds}`;

/** Values cannot be bound in a message of several statements. All of these are texts, of this file's neighbours. */
function withLiterals(text: string, values: readonly unknown[]): string {
  // The same whatever standard_conforming_strings is.
  const written = (value: string) => ` E${literal(value.replaceAll("\\", "\\\\"))}`;
  return text.replaceAll(/\$(\d+)/g, (_, n: string) => written(String(values[Number(n) - 1])));
}

const question = `SELECT current_user AS role, current_database() AS database, version() AS version,
  current_setting('server_version_num')::int AS number, pg_is_in_recovery() AS standby,
  pg_has_role(current_user, 'pg_read_all_stats', 'USAGE') AS monitor`;

/** Settings that say something about locks, and how many there is room for. */
const names = [
  "lock_timeout",
  "statement_timeout",
  "idle_in_transaction_session_timeout",
  "transaction_timeout",
  "deadlock_timeout",
  "log_lock_waits",
  "default_transaction_isolation",
  "default_transaction_read_only",
  "session_replication_role",
  "array_nulls",
  "extra_float_digits",
  "synchronous_commit",
  "fsync",
  "full_page_writes",
  "tcp_keepalives_idle",
  "max_connections",
  "superuser_reserved_connections",
  "reserved_connections",
  "max_locks_per_transaction",
  "max_prepared_transactions",
];

export async function postgresPatient(server: Server): Promise<PostgresPatient> {
  let bare = false;
  // On the one connection that locks are looked at with too: a full server may have no other.
  const asked = async (text: string, values: readonly unknown[]): Promise<Row[]> => {
    await using session = await server.borrow();
    try {
      // Statements of one message are one transaction, also where a pooler lends the server out per message.
      if (bare) return await session.query(`${bounds}; ${withLiterals(text, values)}`);
      await session.query(begin);
      try {
        return await session.query(text, values);
      } finally {
        await session.query("ROLLBACK");
      }
    } catch (error) {
      // Lost, or dropped: nobody is to get it again. What the server has refused is an ERROR of its own.
      if ((error as { severity?: unknown }).severity !== "ERROR") session.destroy();
      throw error;
    }
  };
  const renew = async (): Promise<void> => {
    await server.reset();
    await within(answerMs, asked("SELECT 1", []));
  };
  try {
    await within(checkMs, asked("SELECT 1", []));
  } catch {
    // A pooler in statement mode ends the session for a BEGIN. What else refuses it has no locks either.
    bare = true;
    await renew();
  }
  const [row] = await within(checkMs, asked(question, [])).catch(() => server.run(humble));
  const me: Me = {
    role: String(row?.["role"]),
    database: String(row?.["database"]),
    version: String(row?.["version"]),
    number: Number(row?.["number"]),
    standby: row?.["standby"] === true,
    monitor: row?.["monitor"] === true,
  };
  const [, version] = /^PostgreSQL (\S+)/.exec(me.version) ?? [];
  return {
    server,
    title: version === undefined ? me.version.slice(0, 60) : `PostgreSQL ${version}`,
    version: version ?? me.version,
    me,
    look: (text, values = []) => asked(text, values),
    session: () => sessionWithin(server),
    settings: lazy(async () => {
      // Not within our own bounds, which are settings too; nor as another client of a pooler has left them. Of the
      // socket's the server tells what the system does, which is in no file.
      const rows = await server.run(
        "SELECT name, CASE WHEN name OPERATOR(pg_catalog.~~) 'tcp%' THEN setting ELSE reset_val END AS setting, coalesce(unit, '') AS unit, source FROM pg_catalog.pg_settings WHERE name OPERATOR(pg_catalog.=) ANY($1::pg_catalog.text[])",
        [names],
      );
      return new Map(
        rows.map((each) => [
          String(each["name"]),
          {
            name: String(each["name"]),
            value: String(each["setting"]),
            unit: String(each["unit"]),
            source: String(each["source"]),
          },
        ]),
      );
    }),
    pooling: lazy(async () => (bare ? "statement" : lends(server))),
    hindrance: (error) => hindrance(error, me, schemaIn(server)),
    renew,
  };
}

/** For what speaks the protocol and knows none of the functions. */
const humble = `SELECT current_user AS role, current_catalog AS database, pg_catalog.version() AS version, 0 AS number, false AS standby, false AS monitor`;

async function pidOf(session: Session): Promise<string> {
  return String((await session.query("SELECT pg_catalog.pg_backend_pid() AS pid"))[0]?.["pid"]);
}

const lentMs = 1000;

/**
 * Whether two sessions are kept apart. A pooler in transaction mode lends the server's session out per transaction:
 * while B is inside of one, A's next statement runs elsewhere, or waits for one; and what one has used, the other may get
 * next. An idle pooler shows little, and on a busy one a single try can miss it, hence the repetition, in an order that is
 * left to chance: one that lends in turn would give each its old one.
 */
async function lends(server: Server): Promise<Pooling> {
  await using a = await sessionWithin(server);
  await using b = await sessionWithin(server);
  const [first, second] = [await pidOf(a), await pidOf(b)];
  let lent = first === second;
  let late = 0;
  const ask = async (session: Session): Promise<void> => {
    lent ||= (await pidOf(session)) !== (session === a ? first : second);
  };
  for (let round = 0; round < 5 && !lent; round++) {
    for (let i = 0; i < 3; i++) await ask(Math.random() < 0.5 ? a : b);
    await b.query("BEGIN READ ONLY");
    let asked: Promise<void>;
    try {
      await ask(b);
      asked = ask(a).then(() => ask(a));
      // It waits for B's end where the pooler has no other session to lend. A server that stands still may be late once, too.
      await within(lentMs, asked).catch(() => (lent ||= ++late > 1));
    } finally {
      await b.query("ROLLBACK");
    }
    await asked;
  }
  return lent ? "transaction" : "none";
}

function hindrance(error: unknown, me: Me, schema: string): Finding | undefined {
  const full = noConnection(error);
  if (full) return full;
  const { code, message } = error as { code?: unknown; message?: unknown };
  switch (code) {
    case "42501":
      // Of tables, nothing is read here but Holdfast's own.
      return /for (?:schema|table|view) /.test(String(message))
        ? blind(
            `${String(message)}; it needs SELECT in the schema ${schema}`,
            `GRANT USAGE ON SCHEMA ${schema} TO ${name(me.role)};\nGRANT SELECT ON ALL TABLES IN SCHEMA ${schema} TO ${name(me.role)};`,
          )
        : blind(`${String(message)}; it needs pg_monitor`, `GRANT pg_monitor TO ${name(me.role)};`);
    case "57014":
      return blind(
        `the server took longer than ${statementMs / 1000} s`,
        "Try again when it has less to do.",
      );
    case "55P03":
      return blind(`somebody has locked what it reads for more than ${lockMs / 1000} s`, "Try again later.");
    case "25006":
      return blind("the server only reads", "Ask the primary.");
    default:
      return undefined;
  }
}

/** An identifier, quoted; with what cannot be shown or copied as it is, by its code. */
export function name(text: string): string {
  const quoted = `"${text.replaceAll('"', '""')}"`;
  if (!/\p{Cc}/u.test(text)) return quoted;
  const escaped = quoted
    .replaceAll("\\", "\\\\")
    .replaceAll(/\p{Cc}/gu, (character) => `\\${character.charCodeAt(0).toString(16).padStart(4, "0")}`);
  return `U&${escaped}`;
}

export const literal = (text: string): string => `'${text.replaceAll("'", "''")}'`;

/** "schema"."table". */
export const table = (row: Row): string => `${name(String(row["schema"]))}.${name(String(row["table"]))}`;
