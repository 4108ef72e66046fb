/** Limits of time that end a transaction, or a statement, and the session with it. */
import type { EndedByServer, ServerLimit, SqlConnection } from "../../seam/database.ts";
import { sql } from "../../seam/sql.ts";

const idle = "idle_in_transaction_session_timeout";

const byCode: Readonly<Record<string, string>> = {
  "25P03": idle,
  "25P04": "transaction_timeout",
  "57014": "statement_timeout",
};

/** Clocks of two machines do not count alike. */
const slackMs = 50;

/** As the session has it that asks, which is the role's and the database's as a rule. Settings read like '30s', an interval's spelling. */
export async function limit(
  connection: SqlConnection,
  { errors, quietMs }: EndedByServer,
): Promise<ServerLimit | undefined> {
  const told = errors.map(({ code }) => byCode[String(code)]).find((each) => each !== undefined);
  // In the server's words it was something else, if there are any. A client that passes on none has at least seen how long it was quiet.
  const saidOtherwise = errors.some(({ code }) => /^(?=.*\d)[0-9A-Z]{5}$/.test(String(code)));
  if (told === undefined && (quietMs === undefined || saidOtherwise)) return undefined;
  const setting = told ?? idle;
  const { rows } = await connection.query(
    sql`SELECT v AS value, extract(epoch FROM v::pg_catalog.interval)::pg_catalog.text AS seconds
      FROM pg_catalog.current_setting(${setting}, true) AS v`,
  );
  const [value, seconds] = [String(rows[0]?.["value"]), Number(rows[0]?.["seconds"])];
  if (!(seconds > 0) || (told === undefined && seconds * 1000 > Number(quietMs) + slackMs)) return undefined;
  return { setting, value };
}
