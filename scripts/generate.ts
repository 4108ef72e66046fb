/** Generates the Prisma client of the tests. Its schema engine is not needed for that, and is not downloaded. */
import { spawnSync } from "node:child_process";
import { fileURLToPath } from "node:url";

const { status } = spawnSync("prisma", ["generate"], {
  cwd: fileURLToPath(new URL("../test/prisma", import.meta.url)),
  env: {
    ...process.env,
    PRISMA_SCHEMA_ENGINE_BINARY: "/bin/true",
    CHECKPOINT_DISABLE: "1",
    PRISMA_HIDE_UPDATE_MESSAGE: "1",
  },
  stdio: "inherit",
});
process.exitCode = status ?? 1;
