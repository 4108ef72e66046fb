import { type Holdfast, key } from "holdfast";
import type { ClientBase } from "pg";
import { command, open } from "../support.ts";

const orgs = "holdfast_example_org";
const members = "holdfast_example_member";

interface Provisioned {
  readonly id: number;
  readonly created: boolean;
}

/**
 * There is no row yet, so there is none to lock: SELECT … FOR UPDATE finds nothing and holds nobody back. A key stands
 * for the slug. The second request waits, finds the org, and joins it.
 */
async function provision(hf: Holdfast<ClientBase>, slug: string, user: string): Promise<Provisioned> {
  return hf.transaction({ lock: key("org", slug) }, async (tx) => {
    const { rows } = await tx.client.query<{ id: number }>(`SELECT id FROM ${orgs} WHERE slug = $1`, [slug]);
    const id = rows[0]?.id ?? (await create(tx.client, slug));
    const role = rows[0] ? "member" : "owner";
    await tx.client.query(`INSERT INTO ${members} VALUES ($1, $2, $3)`, [id, user, role]);
    return { id, created: rows.length === 0 };
  });
}

async function create(client: ClientBase, slug: string): Promise<number> {
  const { rows } = await client.query<{ id: number }>(`INSERT INTO ${orgs} (slug) VALUES ($1) RETURNING id`, [
    slug,
  ]);
  return rows[0]?.id as number;
}

export interface Result {
  readonly requests: number;
  readonly created: number;
  /** As the tables have it. */
  readonly orgs: number;
  readonly owners: number;
  readonly members: number;
}

/** Twenty companies; of each, two people sign up at the same time. */
export async function main(url: string): Promise<Result> {
  await using place = await open(url, {
    // The constraint stays: it catches code that forgot the lock.
    [orgs]: "id int GENERATED ALWAYS AS IDENTITY PRIMARY KEY, slug text NOT NULL UNIQUE",
    [members]: "org int NOT NULL, name text NOT NULL, role text NOT NULL",
  });
  const { pool, hf } = place;
  const slugs = Array.from({ length: 20 }, (_, i) => `company-${i}`);
  const answers = await Promise.all(
    slugs.flatMap((slug) => [provision(hf, slug, "Ada"), provision(hf, slug, "Bob")]),
  );
  const { rows } = await pool.query<Pick<Result, "orgs" | "owners" | "members">>(
    `SELECT (SELECT count(*)::int FROM ${orgs}) AS orgs, count(DISTINCT org) FILTER (WHERE role = 'owner')::int AS owners,
       count(*) FILTER (WHERE role = 'member')::int AS members FROM ${members}`,
  );
  const created = answers.filter((answer) => answer.created).length;
  return { requests: answers.length, created, ...(rows[0] as Pick<Result, "orgs" | "owners" | "members">) };
}

await command(
  import.meta.url,
  main,
  ({ requests, orgs: made, owners, members: others }) =>
    `${requests} requests made ${made} orgs, with ${owners} owners and ${others} members`,
);
