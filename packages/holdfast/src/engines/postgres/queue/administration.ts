import type { SqlConnection } from "../../../seam/database.ts";
import { own, sql } from "../../../seam/sql.ts";
import type { QueueAdministration } from "../../../queue/store.ts";
import { ask, numberOf } from "./support.ts";
import { byMap } from "../patience.ts";
import { byPrimary } from "../primary.ts";
import { list, milliseconds, typed } from "../values.ts";

export const administration: QueueAdministration<SqlConnection> = {
  async pause(connection, queue, paused) {
    await ask(
      connection,
      sql`SELECT ${own("queue_pause")}(${byMap(typed(queue, "int"))}, ${typed(paused, "boolean")})::pg_catalog.text AS done`,
    );
  },

  async revive(connection, queue, which) {
    const given = "ids" in which ? which.ids : undefined;
    const { after, upTo, most } = "ids" in which ? { after: 0, upTo: undefined, most: 0 } : which;
    const [row] = await ask(
      connection,
      sql`SELECT n, last, upto FROM ${own("queue_revive_some")}(${byMap(typed(queue, "int"))}, ${given ? list(given) : null}::pg_catalog.text::bigint[],
  ${typed(after, "bigint")}, ${typed(upTo, "bigint")}, ${typed(most, "int")})`,
    );
    return { count: Number(row?.["n"]), last: numberOf(row?.["last"]), upTo: numberOf(row?.["upto"]) };
  },

  async discard(connection, queue, ids) {
    const [row] = await ask(
      connection,
      sql`SELECT ${own("queue_discard_some")}(${byPrimary(typed(queue, "int"))}, ${list(ids)}::pg_catalog.text::bigint[]) AS n`,
    );
    return Number(row?.["n"]);
  },

  async prune(connection, queue, older, { after, most }) {
    const [row] = await ask(
      connection,
      sql`SELECT n, last FROM ${own("queue_prune_some")}(${byPrimary(typed(queue, "int"))},
  least(${typed(older.before, "float8")}, ${milliseconds("pg_catalog.clock_timestamp()")} OPERATOR(pg_catalog.-) ${typed(older.ageMs, "float8")}),
  ${typed(after, "bigint")}, ${typed(most, "int")})`,
    );
    return { count: Number(row?.["n"]), last: numberOf(row?.["last"]) };
  },
};
