/** The same small app on each ORM: users upload images, and the sum of a user's bytes must stay within a quota. */
import { command } from "./support.ts";
import { Client } from "pg";

export interface Uploads {
  /** False: the quota would be exceeded, and nothing was written. */
  upload(userId: string, bytes: number): Promise<boolean>;
  close(): Promise<void>;
}

export const quotaBytes = 3700;

/** A hundred uploads of one user go one after the other: on a small machine the last one waits for more than the usual 5 s. */
export const patient = { wait: 55_000 };

export const table = `CREATE TABLE IF NOT EXISTS user_image (
  id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  user_id text NOT NULL,
  bytes integer NOT NULL
)`;

export interface Result {
  readonly granted: number;
  readonly refused: number;
  readonly rows: number;
}

/** 100 uploads of one user at once; the quota is for 37. */
export async function demo(url: string, open: (url: string) => Promise<Uploads>): Promise<Result> {
  const client = new Client({ connectionString: url });
  await client.connect();
  let made = false;
  try {
    const { rows: found } = await client.query("SELECT to_regclass('user_image') AS name");
    // It may be somebody's own, or left over from a run that was killed.
    if (found[0].name !== null)
      throw new Error("There is a table user_image already: drop it, or give the example another database");
    await client.query(table);
    made = true;
    const uploads = await open(url);
    const answers = await Promise.all(Array.from({ length: 100 }, () => uploads.upload("ada", 100)));
    await uploads.close();
    const { rows } = await client.query<{ n: number }>("SELECT count(*)::int AS n FROM user_image");
    const granted = answers.filter(Boolean).length;
    return { granted, refused: answers.length - granted, rows: rows[0]?.n ?? Number.NaN };
  } finally {
    if (made) await client.query("DROP TABLE user_image");
    await client.end();
  }
}

export function start(file: string, open: (url: string) => Promise<Uploads>): Promise<void> {
  return command(
    file,
    (url) => demo(url, open),
    ({ granted, refused, rows }) => `${granted} uploads granted, ${refused} refused, ${rows} rows`,
  );
}
