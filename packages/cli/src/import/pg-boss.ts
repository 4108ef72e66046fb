/**
 * pg-boss: https://github.com/timgit/pg-boss. Its workers fetch with FOR UPDATE SKIP LOCKED and make the row `active` in the
 * same statement, so a row that is locked by us is passed over by them, and one that is locked by them by us.
 */
import { Failure } from "../failure.ts";
import { plural, shown } from "../text.ts";
import {
  type Ask,
  type Found,
  type Peer,
  type Standing,
  type Taking,
  identifier,
  notBefore,
  text,
  variable,
} from "./peer.ts";

/** Of its tables, from pg-boss 11.1 (26) to 12.35 (43). */
const versions = { from: 26, to: 43 };

/**
 * What a policy of theirs makes unique. `key`: among those that wait, so that it is a key with Holdfast. `group`: among those
 * that run, so that it is a group in order. `alone`: none may be moved while another one of them is with a worker there.
 */
const policies: Readonly<
  Record<string, { readonly as: "key" | "group" | "nothing"; readonly alone: boolean }>
> = {
  standard: { as: "nothing", alone: false },
  short: { as: "key", alone: false },
  exclusive: { as: "key", alone: false },
  stately: { as: "key", alone: true },
  singleton: { as: "group", alone: true },
  key_strict_fifo: { as: "group", alone: true },
};

/** Queues that it keeps for itself. */
const internal = "__pgboss__%";

export const pgBoss: Peer = {
  name: "pg-boss",
  schema: "pgboss",

  async examine(ask, schema): Promise<Found> {
    const own = identifier(schema);
    const [there] = await ask("SELECT to_regclass($1) IS NOT NULL AS yes", [`${own}.version`]);
    if (there?.["yes"] !== true)
      throw new Failure(
        `pg-boss has no tables here: there is no ${shown(schema)}.version. If they are in another schema, name it with --peer-schema.`,
      );
    const [row] = await ask(`SELECT version FROM ${own}.version`);
    const version = Number(row?.["version"]);
    if (!(version >= versions.from && version <= versions.to))
      throw new Failure(
        `The tables of pg-boss in ${shown(schema)} are of version ${version}, and versions ${versions.from} to ${versions.to} are known (pg-boss 11.1 to 12.35). ${version < versions.from ? "Update pg-boss first." : "Update @holdfast/cli."}`,
      );
    const { tied } = await columns(ask, schema);
    const queues = await ask(
      `SELECT q.name, q.policy, q.retry_limit, q.retry_delay, q.retry_backoff,
          count(*) FILTER (WHERE j.state = 'created' AND NOT ${tied} AND j.start_after <= now())::int AS waiting,
          count(*) FILTER (WHERE j.state = 'created' AND NOT ${tied} AND j.start_after > now())::int AS scheduled,
          count(*) FILTER (WHERE j.state = 'retry' AND NOT ${tied})::int AS retrying,
          count(*) FILTER (WHERE j.state = 'active')::int AS active,
          count(*) FILTER (WHERE j.state < 'active' AND ${tied})::int AS tied,
          count(j.singleton_key) FILTER (WHERE j.state < 'active')::int AS keyed,
          count(*) FILTER (WHERE j.state < 'active' AND abs(j.priority) > 32767)::int AS far
        FROM ${own}.queue q LEFT JOIN ${own}.job j ON j.name = q.name AND j.state <= 'active'
        WHERE q.name NOT LIKE $1
        GROUP BY q.name ORDER BY q.name`,
      [internal],
    );
    const schedules = await ask(
      `SELECT name, key, cron, timezone, data FROM ${own}.schedule WHERE name NOT LIKE $1 ORDER BY name, key`,
      [internal],
    );
    return {
      version,
      queues: queues.map((each) => standing(each)),
      schedules: schedules.map((each) => {
        const key = String(each["key"]);
        const name = `${String(each["name"])}${key === "" ? "" : `:${key}`}`;
        const cron = JSON.stringify(each["cron"]);
        const timeZone = JSON.stringify(each["timezone"] ?? "UTC");
        const payload = JSON.stringify(each["data"] ?? null);
        return {
          name,
          code: `schedule(hf, ${JSON.stringify(name)}, { cron: ${cron}, timeZone: ${timeZone} }, async () => {\n  await ${variable(String(each["name"]))}.enqueue(${payload});\n});`,
        };
      }),
    };
  },

  async take(ask, schema, queue): Promise<Taking> {
    const own = identifier(schema);
    const has = await columns(ask, schema);
    const [row] = await ask(`SELECT policy FROM ${own}.queue WHERE name = $1`, [queue]);
    const { as, alone } = policyOf(row?.["policy"]);
    const busy = alone ? await busyKeys(ask, own, has.tied, queue) : [];
    return {
      // A retry is counted when it is fetched.
      async next(most, passed) {
        const rows = await ask(
          `SELECT j.id::text AS id, j.data, j.priority, j.singleton_key,
              j.retry_count + (j.state = 'retry')::int AS failures,
              ${has.group} AS grp, ${notBefore("j.start_after")} AS run_at
            FROM ${own}.job j
            WHERE j.name = $1 AND j.state < 'active' AND NOT ${has.tied} AND j.id <> ALL($3::uuid[])
              AND coalesce(j.singleton_key, '') <> ALL($4::text[])
            ORDER BY j.priority DESC, j.created_on, j.id LIMIT $2 FOR UPDATE OF j SKIP LOCKED`,
          [queue, most, passed, busy],
        );
        return rows.map((each) => {
          // Without a key of its own, it is the only one of its queue.
          const unique = text(each["singleton_key"]) ?? queue;
          return {
            id: String(each["id"]),
            payload: each["data"],
            // Theirs is the other way round, and wider.
            priority: Math.max(-32_767, Math.min(32_767, -Number(each["priority"]))),
            failures: Number(each["failures"]),
            runAt: (each["run_at"] as Date | null) ?? undefined,
            key: as === "key" ? unique : undefined,
            group: as === "group" ? unique : text(each["grp"]),
          };
        });
      },
      async remove(ids) {
        await ask(`DELETE FROM ${own}.job WHERE name = $1 AND id = ANY($2::uuid[])`, [queue, ids]);
      },
    };
  },
};

function policyOf(name: unknown) {
  const policy = policies[String(name)];
  if (!policy) throw new Failure(`pg-boss has a policy ${shown(String(name))}, which is not known.`);
  return policy;
}

/** What came with a later version. */
async function columns(ask: Ask, schema: string): Promise<{ readonly tied: string; readonly group: string }> {
  const rows = await ask(
    "SELECT column_name AS name FROM information_schema.columns WHERE table_schema = $1 AND table_name = 'job'",
    [schema],
  );
  const names = new Set(rows.map((row) => row["name"]));
  return {
    // What waits for another job, and what another one waits for: their ends are told to each other there.
    tied: names.has("blocking") ? "(j.blocked OR j.blocking)" : "false",
    group: names.has("group_id") ? "j.group_id" : "NULL::text",
  };
}

/**
 * Locks all that wait, and then looks who else there is of the same key: with a worker, about to be (somebody else has the
 * lock), or just added. Of these keys nothing is moved, so that no two of a key run at the same time.
 */
async function busyKeys(ask: Ask, own: string, tied: string, queue: string): Promise<string[]> {
  const ours = await ask(
    `SELECT j.id::text AS id FROM ${own}.job j WHERE j.name = $1 AND j.state < 'active' AND NOT ${tied} FOR UPDATE OF j SKIP LOCKED`,
    [queue],
  );
  const rows = await ask(
    `SELECT DISTINCT coalesce(j.singleton_key, '') AS key FROM ${own}.job j
      WHERE j.name = $1 AND (j.state <= 'active' OR (j.state = 'failed' AND j.policy = 'key_strict_fifo'))
        AND NOT EXISTS (SELECT FROM unnest($2::uuid[]) u (id) WHERE u.id = j.id)`,
    [queue, ours.map((row) => row["id"])],
  );
  return rows.map((row) => String(row["key"]));
}

function standing(row: Readonly<Record<string, unknown>>): Standing {
  const name = String(row["name"]);
  const { as } = policyOf(row["policy"]);
  const delay = Number(row["retry_delay"]) * 1000;
  const options = [
    `retries: ${Number(row["retry_limit"])}`,
    row["retry_backoff"] === true
      ? `backoff: { baseMs: ${Math.max(delay, 1000)} }`
      : `backoff: () => ${delay}`,
    ...(as === "group" ? ["groups: { serial: true }"] : []),
  ];
  const remarks: string[] = [];
  if (as === "nothing" && Number(row["keyed"]) > 0)
    remarks.push(
      `${plural(Number(row["keyed"]), "job")} with a singletonKey: the policy standard makes nothing of it, and it is not moved.`,
    );
  if (as === "group")
    remarks.push(
      `Policy ${String(row["policy"])}: the singletonKey becomes the group, and the queue needs groups: { serial: true }.`,
    );
  if (Number(row["far"]) > 0)
    remarks.push(`${plural(Number(row["far"]), "priority", "priorities")} beyond 32,767: cut to that.`);
  return {
    name,
    waiting: Number(row["waiting"]),
    scheduled: Number(row["scheduled"]),
    retrying: Number(row["retrying"]),
    active: Number(row["active"]),
    tied: Number(row["tied"]),
    code: `const ${variable(name)} = queue(hf, ${JSON.stringify(name)}, { ${options.join(", ")} });`,
    remarks,
  };
}
