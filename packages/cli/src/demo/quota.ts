import { type Holdfast, key } from "holdfast";
import { type Quota, quota as limited } from "holdfast/quota";
import type { ClientBase, Pool } from "pg";
import {
  type Race,
  Refused,
  type Size,
  byHand,
  callers,
  failureText,
  failures,
  one,
  sentence,
  work,
} from "./race.ts";

const user = 42;
const limit = 100;

/** About 400 in all, by whatever number of callers. */
const each = ({ processes, callers: own }: Size): number => Math.ceil(400 / (processes * own));
const total = (size: Size): number => each(size) * size.processes * size.callers;

async function uploadsOf(client: ClientBase, owner: number): Promise<number> {
  const { used } = await one<{ used: number }>(
    client,
    "SELECT count(*)::int AS used FROM upload WHERE owner = $1",
    [owner],
  );
  return used;
}

const addUpload = (client: Pick<ClientBase, "query"> | Pool, owner: number): Promise<unknown> =>
  (client as Pool).query("INSERT INTO upload (owner) VALUES ($1)", [owner]);

/** The same in all ways: check, then write. */
async function upload(client: ClientBase): Promise<void> {
  const used = await uploadsOf(client, user);
  if (used >= limit) throw new Refused();
  await work();
  await addUpload(client, user);
}

const naive = (pool: Pool): Promise<void> => byHand(pool, upload);

const serializable = (pool: Pool): Promise<void> => byHand(pool, upload, "SERIALIZABLE");

const locked = (hf: Holdfast<ClientBase>): Promise<void> =>
  hf.transaction({ lock: key("upload", user) }, async (tx) => {
    await upload(tx.client); // the same code
  });

/** Counted by Holdfast: one round trip, in which calls of the same moment go together. */
async function counted(uploads: Quota, pool: Pool): Promise<void> {
  await uploads.consume(user); // throws if there is none left
  await work();
  await addUpload(pool, user);
}

export const quota: Race = {
  name: "quota",
  title: "Quota",
  what: (size) =>
    `A user may have ${limit} uploads, and ${total(size)} come at once. The code counts them (SELECT count(*)) and, if there is room, adds one (INSERT).`,
  counts: "uploads",
  total,
  does: "calls",
  timed: true,
  shared: false,
  tables: `
    CREATE TABLE upload (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, owner bigint NOT NULL);
    CREATE INDEX ON upload (owner)`,
  async reset({ pool, hf }) {
    await pool.query("TRUNCATE upload");
    await limited(hf, { name: "uploads", limit }).reset(user);
  },
  ways: [
    {
      name: "naive",
      code: [
        "const used = await uploadsOf(client, user);",
        "if (used >= limit) throw new Refused();",
        "await addUpload(client, user);",
      ],
      why: "Several count 99 at the same time, and each of them adds one.",
      run: (stage) => callers(stage, each(stage.setting), () => naive(stage.pool)),
    },
    {
      name: "SERIALIZABLE",
      code: ["// the same, after BEGIN ISOLATION LEVEL SERIALIZABLE"],
      why: "The server ends what it cannot put in order. Trying again is left to you.",
      run: (stage) => callers(stage, each(stage.setting), () => serializable(stage.pool)),
    },
    {
      name: "Holdfast lock",
      code: [
        'hf.transaction({ lock: key("upload", user) }, async (tx) => {',
        "  await upload(tx.client); // the same code",
        "});",
      ],
      why: "One upload of a user at a time. Other users do not wait.",
      run: (stage) => callers(stage, each(stage.setting), () => locked(stage.hf)),
    },
    {
      name: "Holdfast quota",
      code: [
        'const uploads = limited(hf, { name: "uploads", limit });',
        "await uploads.consume(user); // throws if there is none left",
        "await addUpload(pool, user);",
      ],
      why: "Holdfast counts: one round trip, in which calls of the same moment go together.",
      run({ hf, pool, ...rest }) {
        const uploads = limited(hf, { name: "uploads", limit });
        return callers({ hf, pool, ...rest }, each(rest.setting), () => counted(uploads, pool));
      },
    },
  ],
  async find({ pool }, _, tally, size) {
    const { counted } = await one<{ counted: number }>(pool, "SELECT count(*)::int AS counted FROM upload");
    const expected = Math.min(limit, total(size));
    return {
      counted,
      expected,
      // Too few is wrong as well: somebody within the quota got an error.
      right: counted === expected && failures(tally) === 0,
      text: sentence(
        `${counted} uploads of ${expected}`,
        counted > expected && `${counted - expected} too many`,
        failureText(tally),
      ),
      facts: { refused: tally.refused },
    };
  },
};
