import type { SqlConnection } from "../../../seam/database.ts";
import { own, sql } from "../../../seam/sql.ts";
import type { QueueAdministration } from "../../../queue/store.ts";
import { ask, bound, numberOf } from "./support.ts";
import { list } from "../values.ts";

export const administration: QueueAdministration<SqlConnection> = {
  async pause(connection, queue, paused) {
    await ask(
      connection,
      sql`SELECT ${own("queue_pause")}(${bound(queue, "int")}, ${bound(paused, "boolean")})::text AS done`,
    );
  },

  async revive(connection, queue, which) {
    const given = "ids" in which ? which.ids : undefined;
    const { after, upTo, most } = "ids" in which ? { after: 0, upTo: undefined, most: 0 } : which;
    const [row] = await ask(
      connection,
      sql`SELECT n, last, upto FROM ${own("queue_revive_some")}(${bound(queue, "int")}, ${given ? list(given) : null}::text::bigint[],
  ${bound(after, "bigint")}, ${bound(upTo, "bigint")}, ${bound(most, "int")})`,
    );
    return { count: Number(row?.["n"]), last: numberOf(row?.["last"]), upTo: numberOf(row?.["upto"]) };
  },

  async discard(connection, queue, ids) {
    const [row] = await ask(
      connection,
      sql`SELECT ${own("queue_discard_some")}(${bound(queue, "int")}, ${list(ids)}::text::bigint[]) AS n`,
    );
    return Number(row?.["n"]);
  },

  async prune(connection, queue, older, { after, most }) {
    const [row] = await ask(
      connection,
      sql`SELECT n, last FROM ${own("queue_prune_some")}(${bound(queue, "int")},
  least(${bound(older.before, "float8")}, extract(epoch FROM clock_timestamp()) * 1000 - ${bound(older.ageMs, "float8")})::float8,
  ${bound(after, "bigint")}, ${bound(most, "int")})`,
    );
    return { count: Number(row?.["n"]), last: numberOf(row?.["last"]) };
  },
};
