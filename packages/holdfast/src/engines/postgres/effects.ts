/** What statements do besides: by defaults, checks, domains, expressions of indexes, policies and views. */
import type { SqlConnection } from "../../seam/database.ts";
import type { TableEffect } from "../../seam/protocol-reader.ts";
import { sql } from "../../seam/sql.ts";

/** Of a default, or in a function's text: what comes out depends on who comes first. */
const numbers = String.raw`\m(nextval|lastval|txid_current|pg_current_xact_id)\M`;
const clock = String.raw`\m(now|clock_timestamp|statement_timestamp|transaction_timestamp|timeofday|current_timestamp|current_time|localtimestamp|localtime|uuidv7|uuid_generate_v1|uuid_generate_v1mc)\M`;
/** A function without any of these reads no table, and executes nothing that does; unless it calls another one. */
const touching = String.raw`\m(from|join|table|perform|execute|call|insert|update|delete|merge)\M`;

/**
 * Functions and operators that expressions use are in pg_depend, but for the server's own. What a function in C does is taken to be
 * harmless, as in `autocommit.writers`.
 */
export async function effects(connection: SqlConnection): Promise<readonly TableEffect[]> {
  const { rows } = await connection.query(sql`
    WITH RECURSIVE relation (rel, name) AS MATERIALIZED (
      SELECT c.oid, pg_catalog.lower(c.relname::pg_catalog.text) FROM pg_catalog.pg_class c
        JOIN pg_catalog.pg_namespace n ON n.oid OPERATOR(pg_catalog.=) c.relnamespace
        WHERE n.nspname OPERATOR(pg_catalog.<>) ALL ('{pg_catalog,information_schema,pg_toast}'::pg_catalog.name[])
          AND c.relkind OPERATOR(pg_catalog.=) ANY ('{r,p,v,m,f}'::pg_catalog."char"[])
    ), typed (rel, typ) AS (
      SELECT a.attrelid, a.atttypid FROM pg_catalog.pg_attribute a JOIN relation r ON r.rel OPERATOR(pg_catalog.=) a.attrelid
        WHERE a.attnum OPERATOR(pg_catalog.>) 0 AND NOT a.attisdropped
      UNION
      SELECT typed.rel, inside.typ FROM typed JOIN pg_catalog.pg_type t ON t.oid OPERATOR(pg_catalog.=) typed.typ
        CROSS JOIN pg_catalog.unnest(ARRAY[t.typbasetype, t.typelem]) inside (typ)
        WHERE inside.typ OPERATOR(pg_catalog.<>) 0::pg_catalog.oid
    ), within (rel, source) AS (
      SELECT rel, rel FROM relation
      UNION
      SELECT w.rel, d.refobjid FROM within w JOIN pg_catalog.pg_rewrite v ON v.ev_class OPERATOR(pg_catalog.=) w.source
        JOIN pg_catalog.pg_depend d ON d.objid OPERATOR(pg_catalog.=) v.oid
          AND d.classid OPERATOR(pg_catalog.=) 'pg_catalog.pg_rewrite'::pg_catalog.regclass
          AND d.refclassid OPERATOR(pg_catalog.=) 'pg_catalog.pg_class'::pg_catalog.regclass
    ), part (rel, class, object, read) AS (
      SELECT adrelid, 'pg_catalog.pg_attrdef'::pg_catalog.regclass, oid, false FROM pg_catalog.pg_attrdef
      UNION ALL SELECT conrelid, 'pg_catalog.pg_constraint'::pg_catalog.regclass, oid, false FROM pg_catalog.pg_constraint
      UNION ALL SELECT t.rel, 'pg_catalog.pg_constraint'::pg_catalog.regclass, c.oid, false FROM typed t
        JOIN pg_catalog.pg_constraint c ON c.contypid OPERATOR(pg_catalog.=) t.typ
      UNION ALL SELECT rel, 'pg_catalog.pg_type'::pg_catalog.regclass, typ, false FROM typed
      UNION ALL SELECT indrelid, 'pg_catalog.pg_class'::pg_catalog.regclass, indexrelid, false FROM pg_catalog.pg_index
      UNION ALL SELECT w.rel, 'pg_catalog.pg_policy'::pg_catalog.regclass, p.oid, true FROM within w
        JOIN pg_catalog.pg_policy p ON p.polrelid OPERATOR(pg_catalog.=) w.source
      UNION ALL SELECT w.rel, 'pg_catalog.pg_rewrite'::pg_catalog.regclass, v.oid, true FROM within w
        JOIN pg_catalog.pg_rewrite v ON v.ev_class OPERATOR(pg_catalog.=) w.source
    ), called (rel, read, function) AS MATERIALIZED (
      SELECT DISTINCT p.rel, p.read, coalesce(o.oprcode::pg_catalog.oid, d.refobjid) FROM part p
        JOIN pg_catalog.pg_depend d ON d.classid OPERATOR(pg_catalog.=) p.class AND d.objid OPERATOR(pg_catalog.=) p.object
          AND d.refclassid OPERATOR(pg_catalog.=) ANY ('{pg_catalog.pg_proc,pg_catalog.pg_operator}'::pg_catalog.regclass[]::pg_catalog.oid[])
        LEFT JOIN pg_catalog.pg_operator o ON o.oid OPERATOR(pg_catalog.=) d.refobjid
          AND d.refclassid OPERATOR(pg_catalog.=) 'pg_catalog.pg_operator'::pg_catalog.regclass
    ), own (function, name, source, changes) AS MATERIALIZED (
      SELECT p.oid, pg_catalog.lower(p.proname::pg_catalog.text), pg_catalog.lower(p.prosrc), p.provolatile OPERATOR(pg_catalog.=) 'v'
        FROM pg_catalog.pg_proc p
        JOIN pg_catalog.pg_namespace n ON n.oid OPERATOR(pg_catalog.=) p.pronamespace
        JOIN pg_catalog.pg_language l ON l.oid OPERATOR(pg_catalog.=) p.prolang
        WHERE n.nspname OPERATOR(pg_catalog.<>) ALL ('{pg_catalog,information_schema}'::pg_catalog.name[])
          AND l.lanname OPERATOR(pg_catalog.<>) ALL ('{internal,c}'::pg_catalog.name[])
    ), used (rel, read, source, changes, touches) AS (
      SELECT c.rel, c.read, o.source, o.changes, o.source OPERATOR(pg_catalog.~) ${touching}::pg_catalog.text
          OR EXISTS (SELECT FROM pg_catalog.pg_depend d WHERE d.objid OPERATOR(pg_catalog.=) o.function
            AND d.classid OPERATOR(pg_catalog.=) 'pg_catalog.pg_proc'::pg_catalog.regclass
            AND d.refclassid OPERATOR(pg_catalog.=) ANY ('{pg_catalog.pg_proc,pg_catalog.pg_class}'::pg_catalog.regclass[]::pg_catalog.oid[]))
          OR EXISTS (SELECT FROM own other WHERE other.function OPERATOR(pg_catalog.<>) o.function
            AND pg_catalog.strpos(o.source, other.name) OPERATOR(pg_catalog.>) 0)
        FROM called c JOIN own o ON o.function OPERATOR(pg_catalog.=) c.function
    ), found (rel, kind) AS (
      SELECT rel, CASE WHEN changes THEN 'acts' ELSE 'decides' END FROM used WHERE touches
      UNION ALL SELECT rel, 'acts when read' FROM used WHERE touches AND changes AND read
      UNION ALL SELECT rel, 'numbers' FROM used WHERE source OPERATOR(pg_catalog.~) ${numbers}::pg_catalog.text
      UNION ALL SELECT rel, 'clock' FROM used WHERE source OPERATOR(pg_catalog.~) ${clock}::pg_catalog.text
      UNION ALL SELECT polrelid, 'decides' FROM pg_catalog.pg_policy
        WHERE pg_catalog.concat(polqual, polwithcheck) OPERATOR(pg_catalog.~) '[{]SUBLINK'
      UNION ALL SELECT attrelid, 'numbers' FROM pg_catalog.pg_attribute WHERE attidentity OPERATOR(pg_catalog.<>) ''
      UNION ALL SELECT e.rel, k.kind FROM (
          SELECT adrelid AS rel, pg_catalog.lower(pg_catalog.pg_get_expr(adbin, adrelid)) AS expression FROM pg_catalog.pg_attrdef
          UNION ALL SELECT typed.rel, pg_catalog.lower(t.typdefault) FROM typed JOIN pg_catalog.pg_type t ON t.oid OPERATOR(pg_catalog.=) typed.typ
        ) e JOIN (VALUES ('numbers', ${numbers}::pg_catalog.text), ('clock', ${clock}::pg_catalog.text)) k (kind, pattern)
          ON e.expression OPERATOR(pg_catalog.~) k.pattern
    )
    SELECT DISTINCT r.name, f.kind FROM found f JOIN relation r ON r.rel OPERATOR(pg_catalog.=) f.rel`);
  return rows.map(({ name, kind }) => ({ table: String(name), kind: String(kind) as TableEffect["kind"] }));
}
