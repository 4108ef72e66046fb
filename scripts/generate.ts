/** Generates the Prisma clients of tests and examples. Prisma's schema engine is not needed for that, and is not downloaded. */
import { spawnSync } from "node:child_process";
import { fileURLToPath } from "node:url";

const prisma = fileURLToPath(new URL("../node_modules/.bin/prisma", import.meta.url));
const prisma6 = fileURLToPath(new URL("../older/node_modules/.bin/prisma", import.meta.url));

for (const folder of [
  "test/prisma",
  "test/prisma-mysql",
  "test/prisma-sqlite",
  "test/prisma-races",
  "examples/prisma",
  "examples/credits",
  "examples/shop",
  "older/prisma",
]) {
  const { status, error } = spawnSync(
    folder.startsWith("older/") ? prisma6 : prisma,
    ["generate", "--schema=schema.prisma"],
    {
      cwd: fileURLToPath(new URL(`../${folder}`, import.meta.url)),
      env: {
        ...process.env,
        PRISMA_SCHEMA_ENGINE_BINARY: "/bin/true",
        CHECKPOINT_DISABLE: "1",
        PRISMA_HIDE_UPDATE_MESSAGE: "1",
      },
      // What it tells is for people: the output of whoever needs the client is not to be mixed with it.
      stdio: ["ignore", 2, 2],
    },
  );
  if (error) console.error(`prisma generate in ${folder}: ${error.message}`);
  if (status !== 0) process.exitCode = status ?? 1;
}
