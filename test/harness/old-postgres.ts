import { existsSync, readdirSync } from "node:fs";

export const OLD_HOME = "/usr/lib/postgresql";

/** The programs of a PostgreSQL before 17, if this machine has one. */
export function oldBinaries(): string | undefined {
  if (!existsSync(OLD_HOME)) return undefined;
  const versions = readdirSync(OLD_HOME).filter((version) => Number(version) < 17);
  const directories = versions.map((version) => `${OLD_HOME}/${version}/bin`);
  return directories.find((directory) => existsSync(`${directory}/postgres`));
}
