/** Limits of time that end a transaction and its session, or a statement. */
import type { DriverError, EndedByServer, ServerLimit, SqlConnection } from "../../seam/database.ts";
import { sql } from "../../seam/sql.ts";

const byErrno: Readonly<Record<number, readonly string[]>> = {
  4031: ["wait_timeout"],
  3024: ["max_execution_time"],
  1969: ["max_statement_time"],
};

/** Of sessions that are silent: MariaDB ends them without a word. Those that a server does not have are not among its settings. */
const idle = [
  "idle_transaction_timeout",
  "idle_write_transaction_timeout",
  "idle_readonly_transaction_timeout",
  "wait_timeout",
];

/** Clocks of two machines do not count alike. */
const slackMs = 50;

// Of what comes unasked for, mysql2 tells the number as the code.
const numberOf = (error: DriverError) => Number((error as { errno?: unknown }).errno ?? error.code);

/** Numbers of the server's own: clients have the two thousands, and more than 45,000. */
const isServers = (number: number) => number >= 1000 && number < 45_000 && Math.trunc(number / 1000) !== 2;

export async function limit(
  connection: SqlConnection,
  { errors, quietMs }: EndedByServer,
): Promise<ServerLimit | undefined> {
  const numbers = errors.map(numberOf);
  const told = numbers.flatMap((number) => byErrno[number] ?? []);
  // In the server's words it was something else, if there are any.
  const names = told.length > 0 ? told : quietMs === undefined || numbers.some(isServers) ? [] : idle;
  if (names.length === 0) return undefined;
  const { rows } = await connection.query(
    sql`SHOW SESSION VARIABLES WHERE Variable_name IN (${sql.join(names)}) AND Value > 0`,
  );
  const [first] = rows
    .map((row) => ({ setting: String(row["Variable_name"]), value: Number(row["Value"]) }))
    .filter(({ value }) => told.length > 0 || value * 1000 <= Number(quietMs) + slackMs)
    .toSorted((a, b) => a.value - b.value);
  return (
    first && { ...first, value: `${first.value} ${first.setting === "max_execution_time" ? "ms" : "s"}` }
  );
}
