/** How functions of quotas come to a limit. */
import { type Statement, sql } from "../../../seam/sql.ts";

/** The most that can be counted: whole numbers are exact up to here. */
export const mostUsed: Statement = sql.raw("9007199254740991");

/** "No limit", where one is stored or comes with a plan: NULL there means that it has none of its own. */
export const unlimited = "9007199254740992";

/** The limit of a bucket's own, of its plan, or of the code; NULL: there is none. */
export const limitOf = (bucket: string, rule: string, code: string): Statement =>
  sql.raw(
    `nullif(coalesce(${bucket}.own_limit, (${rule}->'plans'->>${bucket}.plan)::bigint, ${code}), ${unlimited})`,
  );
