/** Three questions, one answer. Pure: the command prints it, and a page can. */
import { type Need, type Tool, lacking, tableless, tools } from "./answers.ts";
import { openings } from "./open.ts";
import type { Database, Long, What } from "./questions.ts";

export interface Asked {
  readonly what: What;
  readonly long: Long;
  readonly database: Database;
}

export interface Answer {
  readonly use: string;
  readonly why: string;
  /** A whole module. */
  readonly code: string;
  readonly install: string;
  readonly note?: string;
  /** A page of docs/. */
  readonly page: string;
  readonly needs: Tool["needs"];
}

const fits = ({ needs }: Tool, database: Database): boolean =>
  needs.every((need) => !lacking[database]?.includes(need));

export function choose({ what, long, database }: Asked): Answer {
  let tool: Tool | undefined = tools[what][long];
  while (tool && !fits(tool, database)) tool = tool.otherwise;
  if (!tool) throw new Error(`nothing for ${what}, ${long} on ${database}`);
  const { use, why, page, needs } = tool;
  const { install, note } = openings[database];
  return {
    use,
    why,
    code: moduleOf(tool, database),
    install: ["npm install holdfast", ...(install === "" ? [] : [install])].join(" "),
    ...(note !== undefined && { note }),
    page,
    needs,
  };
}

function moduleOf({ imports, code, needs }: Tool, database: Database): string {
  const { imports: ours, code: open } = openings[database];
  const names = Map.groupBy(Object.entries({ ...imports, holdfast: "holdfast" }), ([, from]) => from);
  const lines = [...names].map(
    ([from, found]) =>
      `import { ${found
        .map(([name]) => name)
        .toSorted()
        .join(", ")} } from "${from}";`,
  );
  if (!code.includes("hf")) return code;
  const tables = needs.some((need) => hasTables(need, database));
  return [
    ...[...ours, ...lines].toSorted((a, b) => (from(a) < from(b) ? -1 : 1)),
    "",
    open,
    ...(tables ? ["await hf.migrate(); // once per deployment"] : []),
    "",
    code,
  ].join("\n");
}

const from = (line: string): string => /from "(.*)";$/.exec(line)?.[1] ?? "";

/** Whether it needs what `hf.migrate()` makes. */
const hasTables = (need: Need, database: Database): boolean =>
  need === "transactionLocks" ? !tableless.includes(database) : need !== "rowLocks" && need !== "versions";
