// The type of a dashboard as Grafana's JSON has it: Grafana's own types (the oldest release that the dashboards are
// for), without their index signatures and `unknown`s, so that a misspelt field or a wrong value does not compile.
import type { Dashboard, FieldConfig, Panel, VariableModel } from '@grafana/schema';
import type * as heatmap from '@grafana/schema/dist/esm/raw/composable/heatmap/panelcfg/x/HeatmapPanelCfg_types.gen';
import type * as prometheus from '@grafana/schema/dist/esm/raw/composable/prometheus/dataquery/x/PrometheusDataQuery_types.gen';
import type * as stat from '@grafana/schema/dist/esm/raw/composable/stat/panelcfg/x/StatPanelCfg_types.gen';
import type * as timeline from '@grafana/schema/dist/esm/raw/composable/statetimeline/panelcfg/x/StateTimelinePanelCfg_types.gen';
import type * as table from '@grafana/schema/dist/esm/raw/composable/table/panelcfg/x/TablePanelCfg_types.gen';
import type * as timeseries from '@grafana/schema/dist/esm/raw/composable/timeseries/panelcfg/x/TimeSeriesPanelCfg_types.gen';

/** T as JSON can hold it: the values of its enums instead of their names. */
type Plain<T> = T extends string
  ? `${T}`
  : T extends number
    ? `${T}` extends `${infer N extends number}`
      ? N
      : T
    : T extends (infer Element)[]
      ? Plain<Element>[]
      : T extends object
        ? { [Key in keyof T]: Plain<T[Key]> }
        : T;

type DataSource = { type: 'prometheus'; uid: '${datasource}' };
type Query = Omit<prometheus.PrometheusDataQuery, 'datasource'> & { datasource: DataSource };
type DataLink = { title: string; url: string; targetBlank?: boolean };

type Defaults<Custom> = Omit<FieldConfig, 'custom' | 'links'> & { custom: Custom; links?: DataLink[] };
/** One property that an override sets. */
type Property<Fields, Prefix extends string = ''> = {
  [Key in keyof Fields & string]-?: { id: `${Prefix}${Key}`; value: Fields[Key] };
}[keyof Fields & string];
type Override<Custom> = {
  matcher: { id: 'byName'; options: string };
  properties: (Property<Omit<Defaults<Custom>, 'custom'>> | Property<Custom, 'custom.'>)[];
};
type Transformation =
  | { id: 'merge'; options: Record<string, never> }
  | {
      id: 'organize';
      options: {
        excludeByName: Record<string, boolean>;
        indexByName: Record<string, number>;
        renameByName: Record<string, string>;
      };
    };

type PanelOf<Kind extends string, Options, Custom> = Omit<
  Panel,
  'type' | 'datasource' | 'options' | 'fieldConfig' | 'targets' | 'transformations'
> & {
  type: Kind;
  datasource: DataSource;
  options: Options;
  fieldConfig: { defaults: Defaults<Custom>; overrides: Override<Custom>[] };
  targets: Query[];
  transformations?: Transformation[];
};

type AnyPanel =
  | PanelOf<'heatmap', heatmap.Options, heatmap.FieldConfig>
  | PanelOf<'stat', stat.Options, Record<string, never>>
  | PanelOf<'state-timeline', timeline.Options, timeline.FieldConfig>
  | PanelOf<'table', table.Options, table.FieldConfig>
  | PanelOf<'timeseries', timeseries.Options, timeseries.FieldConfig>;

type Variable = Omit<VariableModel, 'query' | 'datasource'> &
  ({ type: 'datasource'; query: 'prometheus' } | { type: 'query'; datasource: DataSource; query: ValuesQuery });
type ValuesQuery = { query: string; refId: string };

export type Board = Plain<
  Omit<Dashboard, 'panels' | 'templating' | 'annotations'> & {
    panels: AnyPanel[];
    templating: { list: Variable[] };
    annotations: { list: [] };
  }
>;
