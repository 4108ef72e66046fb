import type { SqlConnection } from "../../../seam/database.ts";
import { sql } from "../../../seam/sql.ts";
import { type FailedRow, type KeyRow, decideRevive } from "../../../queue/decide/index.ts";
import type { QueueAdministration } from "../../../queue/store.ts";
import { pauseOf } from "./claim.ts";
import { type QueueRows, chunks } from "./rows.ts";
import { delayedTable, failedTable, groupedTable, keyTable, queueTable, readyTable } from "./tables.ts";

export function queueAdministration<C extends SqlConnection>(queue: QueueRows<C>): QueueAdministration<C> {
  const { rows, dialect } = queue;
  const failedOf = (number: number) => rows.is(failedTable, "queue", number);
  return {
    /** Waits for claims that are under way, so that nothing is claimed after it. */
    pause: (connection, number, paused, how) =>
      queue.run(connection, how, async () => {
        if (dialect.exclude) await connection.query(dialect.exclude(pauseOf(number), false));
        await rows.update(connection, queueTable, rows.is(queueTable, "id", number), { paused });
      }),

    revive: (connection, number, which, how) =>
      queue.run(connection, how, async () => {
        const order = sql`id`;
        let upTo: number | undefined;
        let wanted: FailedRow[];
        if ("ids" in which) {
          const where = sql`${failedOf(number)} AND ${rows.among(failedTable, "id", which.ids)}`;
          wanted = await rows.select(connection, failedTable, where, { order, locking: "update" });
        } else {
          // Those that fail again meanwhile are not begun again and again.
          upTo = which.upTo ?? (await lastOf(connection, number));
          const where = sql`${failedOf(number)} AND ${rows.compare(failedTable, "id", ">", which.after)} AND ${rows.compare(failedTable, "id", "<=", upTo)}`;
          const { most: limit } = which;
          wanted = await rows.select(connection, failedTable, where, { order, limit, locking: "update" });
        }
        const keyed = wanted.flatMap(({ key, id }) => (key === undefined ? [] : { key, job: id }));
        const holders = await queue.takeKeys(connection, number, keyed);
        const { verdicts, writes } = decideRevive(wanted, holders);
        await queue.apply(connection, writes);
        await queue.knowAgain(connection, number, [], verdicts.back);
        const more = "most" in which && wanted.length === which.most;
        return { count: verdicts.count, last: more ? wanted.at(-1)?.id : undefined, upTo };
      }),

    discard: (connection, number, ids, how) =>
      queue.run(connection, how, async () => {
        const gone: KeyRow[] = [];
        let count = 0;
        for (const from of [failedTable, delayedTable, readyTable, groupedTable] as const)
          for (const some of chunks(ids)) {
            const where = sql`${rows.is(from, "queue", number)} AND ${rows.among(from, "id", some)}`;
            // One that somebody has in a transaction runs.
            const found = await rows.select(connection, from, where, {
              locking: from === failedTable ? "update" : "skip",
            });
            if (found.length === 0) continue;
            await rows.removeRows(connection, from, found);
            count += found.length;
            for (const { id, key } of found)
              if (key !== undefined) gone.push({ queue: number, key, job: id });
          }
        const held = await queue.lockKeys(
          connection,
          number,
          gone.map(({ key }) => key),
        );
        const theirs = new Set(gone.map(({ key, job }) => `${job} ${key}`));
        const free = held.filter(({ key, job }) => theirs.has(`${job} ${key}`));
        await rows.removeRows(connection, keyTable, free);
        return count;
      }),

    prune: (connection, number, { before, ageMs }, { after, most: limit }, how) =>
      queue.run(connection, how, async () => {
        const where = sql`${failedOf(number)} AND ${rows.compare(failedTable, "id", ">", after)}`;
        const found = await rows.select(connection, failedTable, where, {
          columns: ["id", "failed_at"],
          order: sql`id`,
          limit,
        });
        const moment = await rows.clock(connection);
        const edge = Math.min((before ?? Infinity) * 1000, moment - ageMs * 1000);
        const old = found.filter(({ failed_at }) => failed_at < edge).map(({ id }) => id);
        const late = rows.compare(failedTable, "failed_at", "<", Math.round(edge));
        const which = sql`${failedOf(number)} AND ${rows.among(failedTable, "id", old)} AND ${late}`;
        const count = old.length > 0 ? await rows.remove(connection, failedTable, which) : 0;
        return { count, last: found.length < limit ? undefined : found.at(-1)?.id };
      }),
  };

  async function lastOf(connection: C, number: number): Promise<number> {
    const [last] = await rows.select(connection, failedTable, failedOf(number), {
      columns: ["id"],
      order: sql`id DESC`,
      limit: 1,
    });
    return last?.id ?? 0;
  }
}
