import { unsupported } from "../../seam/capabilities.ts";
import type { DriverError, Failure, Violated } from "../../seam/database.ts";

/** SQLSTATEs, https://www.postgresql.org/docs/current/errcodes-appendix.html */
const failures: Readonly<Record<string, Failure>> = {
  "40P01": "deadlock",
  "40001": "serialization",
  "55P03": "lock-timeout",
  "23505": "unique",
  "23503": "foreign-key",
  "23514": "check",
  "57014": "canceled",
  // transaction_timeout (17+), and idle_in_transaction_session_timeout, which stands in for it before.
  "25P04": "deadline",
  "25P03": "deadline",
  "25P02": "aborted",
  "25P01": "not-in-transaction",
  "25006": "read-only",
  "3F000": "schema-missing",
  "42P01": "schema-missing",
  "42883": "schema-missing",
  // A column, also of what a function returns: it is there, and older than this code.
  "42703": "schema-missing",
  "42501": "denied",
  // Who one is, is not believed: by a password, or at all.
  "28000": "denied",
  "28P01": "denied",
  // Disk, memory, what else a server has too little of, and what its settings allow.
  "53000": "full",
  "53100": "full",
  "53200": "full",
  "53400": "full",
  // Input and output, a file that is not there, damaged data, a damaged index.
  "58030": "storage",
  "58P01": "storage",
  XX001: "storage",
  XX002: "storage",
  "53300": "too-many-connections",
  // Terminated, crashed, starting up or shutting down, and idle_session_timeout.
  "57P01": "lost",
  "57P02": "lost",
  "57P03": "lost",
  "57P05": "lost",
  // Of `at_map`.
  HF001: "map-changed",
};

export function classify(error: DriverError): Failure | undefined {
  const { code } = error;
  if (typeof code !== "string" || hopeless(error) !== undefined) return undefined;
  // Class 08: connection exceptions.
  return (
    (Object.hasOwn(failures, code) ? failures[code] : undefined) ??
    (/^08[0-9A-Z]{3}$/.test(code) ? "lost" : undefined)
  );
}

/** In these words, and by the code of a protocol violation, PgBouncer ends the session of whoever sends BEGIN. */
const statementMode = /transaction blocks not allowed in statement pooling mode/;

export const noTransactions = unsupported(
  "A pooler in statement mode stands between this client and the server, and it has no transactions. Use its transaction " +
    "mode (pool_mode = transaction of PgBouncer), or an address that leads to the server itself",
);

export function hopeless({ message = "" }: DriverError): string | undefined {
  return statementMode.test(message) ? noTransactions.why : undefined;
}

/** pg and PGlite name these fields one way, postgres.js the other. */
interface Named {
  readonly constraint?: string;
  readonly constraint_name?: string;
  readonly table?: string;
  readonly table_name?: string;
  readonly detail?: string;
}

export function violated(error: object): Violated {
  const { constraint, constraint_name, table, table_name, detail } = error as Named;
  const columns = /^Key \((.*?)\)=/.exec(detail ?? "")?.[1];
  return {
    constraint: constraint ?? constraint_name,
    table: table ?? table_name,
    columns: columns?.split(", ").map((name) => name.replaceAll(/^"|"$/g, "")),
  };
}

/** One code for both. The place in the server's source is the same in every language; Prisma passes on the words only. */
export function waited(error: object): boolean | undefined {
  const { routine, message = "" } = error as { routine?: unknown; message?: string };
  if (typeof routine === "string") return routine === "ProcessInterrupts";
  if (/due to lock timeout/.test(message)) return true;
  return /could not obtain lock/.test(message) ? false : undefined;
}
