/**
 * graphile-worker: https://worker.graphile.org. Its workers fetch with FOR UPDATE SKIP LOCKED and set `locked_at` in the same
 * statement. Of a named queue they lock its row, too, and pass it over if somebody else has.
 */
import { Failure } from "../failure.ts";
import { plural, shown } from "../text.ts";
import { userOf } from "../user.ts";
import { type Found, type Peer, type Taking, identifier, notBefore, text, variable } from "./peer.ts";

/** Its migrations, from graphile-worker 0.16 (18) to 0.18 (20). */
const versions = { from: 18, to: 20 };

export const graphileWorker: Peer = {
  name: "graphile-worker",
  schema: "graphile_worker",

  async examine(ask, schema): Promise<Found> {
    const own = identifier(schema);
    const [there] = await ask("SELECT to_regclass($1) IS NOT NULL AS yes", [`${own}.migrations`]);
    if (there?.["yes"] !== true)
      throw new Failure(
        `graphile-worker has no tables here: there is no ${shown(schema)}.migrations. If they are in another schema, name it with --peer-schema.`,
      );
    const [row] = await ask(`SELECT max(id) AS version FROM ${own}.migrations`);
    const version = Number(row?.["version"]);
    if (!(version >= versions.from && version <= versions.to))
      throw new Failure(
        `The tables of graphile-worker in ${shown(schema)} are of migration ${version}, and ${versions.from} to ${versions.to} are known (graphile-worker 0.16 to 0.18). ${version < versions.from ? "Update graphile-worker first." : "Update @holdfast/cli."}`,
      );
    // It has switched on row security, without a policy: whoever does not own the tables would see none of the jobs.
    const [hidden] = await ask("SELECT row_security_active($1::regclass) AS yes", [`${own}._private_jobs`]);
    if (hidden?.["yes"] === true)
      throw new Failure(
        `${shown(await userOf({ kind: "postgres", query: ask }))} sees no row of ${shown(schema)}._private_jobs (row security): connect as the owner of that table.`,
      );
    const queues = await ask(
      `SELECT t.identifier AS name, max(j.max_attempts)::int AS attempts,
          count(*) FILTER (WHERE j.is_available AND j.attempts = 0 AND j.run_at <= now())::int AS waiting,
          count(*) FILTER (WHERE j.is_available AND j.attempts = 0 AND j.run_at > now())::int AS scheduled,
          count(*) FILTER (WHERE j.is_available AND j.attempts > 0)::int AS retrying,
          count(*) FILTER (WHERE j.locked_at IS NOT NULL)::int AS active,
          count(j.job_queue_id) FILTER (WHERE j.is_available)::int AS named,
          count(*) FILTER (WHERE j.is_available AND j.flags IS NOT NULL)::int AS flagged,
          array_remove(array_agg(DISTINCT s.queue_name), NULL) AS shared
        FROM ${own}._private_tasks t LEFT JOIN ${own}._private_jobs j ON j.task_id = t.id
          LEFT JOIN (SELECT q.id, q.queue_name FROM ${own}._private_job_queues q JOIN ${own}._private_jobs x ON x.job_queue_id = q.id
            WHERE x.is_available GROUP BY q.id, q.queue_name HAVING count(DISTINCT x.task_id) > 1) s ON s.id = j.job_queue_id
        GROUP BY t.identifier ORDER BY t.identifier`,
    );
    const crontabs = await ask(
      `SELECT identifier AS name FROM ${own}._private_known_crontabs ORDER BY identifier`,
    );
    return {
      version,
      queues: queues.map((each) => {
        const name = String(each["name"]);
        const attempts = Number(each["attempts"] ?? 25);
        const [named, flagged] = [Number(each["named"]), Number(each["flagged"])];
        const shared = each["shared"] as readonly string[];
        const remarks: string[] = [];
        if (named > 0)
          remarks.push(
            `${plural(named, "job")} in named queues: these become groups, and the queue needs groups: { serial: true }.`,
          );
        if (shared.length > 0)
          remarks.push(
            `${plural(shared.length, "named queue")} with jobs of other tasks too (${shown(shared[0] ?? "")}, …): a group is one at a time within its queue, not across queues.`,
          );
        if (flagged > 0) remarks.push(`${plural(flagged, "job")} with flags, which are not moved.`);
        return {
          name,
          waiting: Number(each["waiting"]),
          scheduled: Number(each["scheduled"]),
          retrying: Number(each["retrying"]),
          active: Number(each["active"]),
          tied: 0,
          code: `const ${variable(name)} = queue(hf, ${JSON.stringify(name)}, { retries: ${attempts - 1}, backoff: (failures) => 1000 * Math.exp(Math.min(failures, 10))${named > 0 ? ", groups: { serial: true }" : ""} });`,
          remarks,
        };
      }),
      schedules: crontabs.map((each) => {
        const name = String(each["name"]);
        return {
          name,
          code: `schedule(hf, ${JSON.stringify(name)}, { cron: "as in your crontab" }, async () => {\n  await ${variable(name)}.enqueue({});\n});`,
        };
      }),
    };
  },

  async take(ask, schema, queue): Promise<Taking> {
    const own = identifier(schema);
    // Its workers lock the rows of all named queues while they fetch: for a moment, which is waited for. They never wait.
    const named = await ask(
      `SELECT q.id FROM ${own}._private_job_queues q WHERE q.is_available AND EXISTS (SELECT FROM ${own}._private_jobs j
          WHERE j.job_queue_id = q.id AND j.is_available AND j.task_id = (SELECT t.id FROM ${own}._private_tasks t WHERE t.identifier = $1))
        ORDER BY q.id FOR UPDATE OF q`,
      [queue],
    );
    const held = named.map((row) => row["id"]);
    return {
      async next(most, passed) {
        const rows = await ask(
          `SELECT j.id::text AS id, j.payload, j.priority, j.attempts, j.key, ${notBefore("j.run_at")} AS run_at,
              (SELECT q.queue_name FROM ${own}._private_job_queues q WHERE q.id = j.job_queue_id) AS grp
            FROM ${own}._private_jobs j
            WHERE j.is_available AND j.task_id = (SELECT t.id FROM ${own}._private_tasks t WHERE t.identifier = $1)
              AND (j.job_queue_id IS NULL OR j.job_queue_id = ANY($4::int[])) AND j.id <> ALL($3::bigint[])
            ORDER BY j.priority, j.run_at, j.id LIMIT $2 FOR UPDATE OF j SKIP LOCKED`,
          [queue, most, passed, held],
        );
        return rows.map((each) => ({
          id: String(each["id"]),
          payload: each["payload"],
          priority: Math.max(-32_767, Number(each["priority"])),
          failures: Number(each["attempts"]),
          runAt: (each["run_at"] as Date | null) ?? undefined,
          key: text(each["key"]),
          group: text(each["grp"]),
        }));
      },
      async remove(ids) {
        await ask(`DELETE FROM ${own}._private_jobs WHERE id = ANY($1::bigint[])`, [ids]);
      },
    };
  },
};
